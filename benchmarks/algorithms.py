"""Time and memory of credit assignment at full size, beside verl's functions where verl is installed.

    python benchmarks/algorithms.py                      # all estimators, B=8192, T=4096
    python benchmarks/algorithms.py gae grpo --rows 1024

Each case runs in a process of its own on one thread: best wall time of the repeats, and peak resident memory as a
multiple of the input tensors (inputs included). Targets: gae under 1.5 s, grpo under 0.5 s, memory under 3.

Scans are two float64 matrix products over blocks of tokens, for as many rows at a time as fit into a cache: no loop
over tokens, no transposed copy, no memory beside the results. On a busy machine compare `--cpu-time`.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

GROUP_SIZE = 8
TARGETS = {"gae": 1.5, "grpo": 0.5}


def inputs(rows: int, width: int) -> dict[str, Any]:
    """Float32 columns of a step: ragged rows with the reward on the last token."""
    import torch

    generator = torch.Generator().manual_seed(0)
    length = torch.randint(width // 4, width + 1, (rows,), generator=generator)
    mask = torch.arange(width) < length[:, None]
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), length - 1] = torch.randint(0, 2, (rows,), generator=generator).float()
    return {"token_rewards": rewards, "mask": mask, "group_id": torch.arange(rows) // GROUP_SIZE}


def columns_for(name: str, rows: int, width: int) -> dict[str, Any]:
    """What an estimator needs beyond the columns of every step."""
    import torch

    from hybridflow.algorithms.advantages import needs_of

    generator = torch.Generator().manual_seed(1)
    found: dict[str, Any] = {}
    for column in sorted(needs_of(name)):
        if column == "reward_info":
            found[column] = [{"answer": float(i % 2), "format": float(i % 3)} for i in range(rows)]
        elif column == "baseline_score":
            found[column] = torch.rand(rows, generator=generator, dtype=torch.float64)
        elif column == "old_log_probs":
            found[column] = -torch.rand(rows, width, generator=generator)
        else:
            found[column] = torch.rand(rows, width, generator=generator)
    return found


def ours(name: str, rows: int, width: int) -> tuple[Callable[[], Any], int]:
    """A call of our estimator, and the bytes of its inputs."""
    import torch

    from hybridflow.algorithms.advantages import ADVANTAGES
    from hybridflow.config.algorithm import AlgorithmConfig

    config = AlgorithmConfig(adv_estimator=name, lam=0.95, gdpo_reward_keys=("answer", "format"))
    columns = {**inputs(rows, width), **columns_for(name, rows, width)}
    size = sum(value.nbytes for value in columns.values() if isinstance(value, torch.Tensor))
    return lambda: ADVANTAGES[name](config=config, **columns), size


def verls(name: str, rows: int, width: int) -> tuple[Callable[[], Any], int]:
    """The same call of verl's function (gae and grpo)."""
    import numpy
    import torch
    from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]

    columns = {**inputs(rows, width), **columns_for(name, rows, width)}
    mask, rewards = columns["mask"].float(), columns["token_rewards"]
    size = sum(value.nbytes for value in columns.values() if isinstance(value, torch.Tensor))
    if name == "gae":
        values = columns["values"]
        return lambda: core_algos.compute_gae_advantage_return(
            token_level_rewards=rewards, values=values, response_mask=mask, gamma=1.0, lam=0.95
        ), size
    index = numpy.array([str(i) for i in columns["group_id"].tolist()], dtype=object)
    return lambda: core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, index=index
    ), size


def measure(whose: str, name: str, rows: int, width: int, repeats: int, cpu_time: bool) -> tuple[float, float]:
    """(best seconds, peak memory / input bytes); runs in a fresh process."""
    import torch

    torch.set_num_threads(1)
    clock = time.process_time if cpu_time else time.perf_counter
    # What Python and torch themselves take is not the estimator's.
    floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    call, size = {"ours": ours, "verl": verls}[whose](name, rows, width)
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - floor) / size


def main() -> None:
    from hybridflow.config.choices import ADV_ESTIMATORS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ADV_ESTIMATORS))
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds in place of wall seconds")
    given = parser.parse_args()
    size = (given.rows, given.width, given.repeats, given.cpu_time)
    with_verl = importlib.util.find_spec("verl") is not None
    print(f"B={given.rows} T={given.width}, one thread, best of {given.repeats}")
    print(f"{'estimator':<30}{'seconds':>10}{'memory':>10}{'target':>10}{'verl s':>10}{'verl mem':>10}")
    for name in given.names:
        cells = [cell(("ours", name, *size))]
        if with_verl and name in ("gae", "grpo"):
            cells.append(cell(("verl", name, *size)))
        numbers = [f"{seconds:>10.3f}{memory:>10.2f}" for seconds, memory in cells]
        target = f"{TARGETS[name]:>10.1f}" if name in TARGETS else " " * 10
        print(f"{name:<30}{numbers[0]}{target}{''.join(numbers[1:])}", flush=True)
    if not with_verl:
        print("verl is not installed: its columns are empty")


def cell(arguments: tuple[str, str, int, int, int, bool]) -> tuple[float, float]:
    """One measurement in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


if __name__ == "__main__":
    main()
