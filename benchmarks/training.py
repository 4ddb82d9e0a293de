"""Speed of the training engine in one process: against a plain PyTorch loop, and as a share of the matmul ceiling.

    python benchmarks/training.py MODEL_FOLDER [--tokens 2048] [--segment 128] [--dtype fp32] [--repeat 3]
    python benchmarks/training.py MODEL_FOLDER --group 8 [--response 64] [--prompt 256]

Prints, for one update (forward, log-prob, backward, step): seconds, tokens/s, FLOP/s (6 x parameters x tokens) and
their share of a 2048^3 matmul measured beside it; the same for a hand-written loop over the same rows as a batch; and
the ratio of both. With --group: the same rows of one prompt packed whole and behind one copy of it, forward and update.
Runs unchanged on GPUs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hybridflow.algorithms.contract import Counts, Metric, Outputs
from hybridflow.batch.balance import balance, row_cost
from hybridflow.batch.batch import Batch
from hybridflow.config.model import FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.models.load import dtype_of, load_causal_lm
from hybridflow.topology.parallel import ParallelDims


class NegativeLogProb:
    """Minus the mean log-prob: the cheapest loss there is."""

    needs = frozenset({"log_probs"})

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, dict[str, Metric]]:
        assert outputs.log_probs is not None
        return -torch.where(rows["loss_mask"], outputs.log_probs, 0.0).sum() / counts.tokens, {}


def make_rows(segments: int, length: int, vocabulary: int, prompt: int = 1) -> Batch:
    """Rows of ``length`` response tokens behind one prompt; with one prompt token N is segments x length."""
    ids = torch.randint(10, vocabulary, (segments, length + prompt), generator=torch.Generator().manual_seed(0))
    return Batch(
        {
            "prompt_ids": ids[:1, :prompt].repeat(segments, 1),
            "prompt_length": torch.full((segments,), prompt),
            "response_ids": ids[:, prompt:],
            "response_length": torch.full((segments,), length),
            "loss_mask": torch.ones(segments, length, dtype=torch.bool),
        }
    )


def seconds(step: Callable[[], object], repeat: int, device: str) -> float:
    """The fastest of ``repeat`` runs after one warm-up."""
    found = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def build(given: argparse.Namespace, **options: bool) -> FSDPEngine:
    return FSDPEngine(
        model=ModelConfig(path=given.model),
        head="lm",
        sharding=FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype=given.dtype)),
        dims=ParallelDims(),
        optim=OptimConfig(),
        device=given.device,
        **options,
    )


def compare_sharing(given: argparse.Namespace) -> None:
    """One group of rows, its prompt encoded once against once per row; both in turn, the fastest of each counts."""
    needs, micro = frozenset({"log_probs"}), MicroBatching(max_tokens=1 << 30)
    engines = [build(given, share_prompts=shares) for shares in (False, True)]
    vocabulary = next(shape[0] for name, shape in engines[0].parameter_shapes().items() if "embed" in name)
    rows = make_rows(given.group, given.response, vocabulary, given.prompt)
    counts = engines[0].counts(rows)
    flops, log_probs = [], []
    for engine in engines:
        with FlopCounterMode(display=False) as counter:
            log_probs.append(engine.forward(rows, needs, temperature=1.0, micro=micro)["log_probs"])
        flops.append(counter.get_total_flops())
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(given.repeat + 1):
        for number, engine in enumerate(engines):
            for what in ("forward", "update"):
                wall, cpu = time.perf_counter(), time.process_time()
                if what == "forward":
                    engine.forward(rows, needs, temperature=1.0, micro=micro)
                else:
                    engine.update(rows, NegativeLogProb(), temperature=1.0, micro=micro, counts=counts)
                if given.device.startswith("cuda"):
                    torch.cuda.synchronize()
                spent = time.perf_counter() - wall, time.process_time() - cpu
                taken.setdefault((what, number), []).append(spent)
    print(f"{given.group} rows, prompt {given.prompt}, response {given.response}, {given.dtype}: prompt per row / once")
    print(f"forward  {flops[0] / 1e9:9.1f} / {flops[1] / 1e9:8.1f} GFLOP    {flops[0] / flops[1]:.2f} x")
    for what in ("forward", "update"):
        for kind, name in enumerate(("wall", "CPU")):
            whole, once = (min(runs[kind] for runs in taken[what, number][1:]) for number in (0, 1))
            print(f"{what:8s} {whole:9.3f} / {once:8.3f} s {name:8s} {whole / once:.2f} x")
    print(f"largest difference of log-probs {float((log_probs[0] - log_probs[1]).abs().max()):.1e}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--segment", type=int, default=128)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--group", type=int, help="rows of one prompt: measures prefix sharing alone")
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    given = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if given.group is not None:
        compare_sharing(given)
        return
    dtype = dtype_of(given.dtype)
    left, right = (torch.randn(2048, 2048, dtype=dtype, device=given.device) for _ in range(2))
    ceiling = 2 * 2048**3 / seconds(lambda: left @ right, 5, given.device)
    engine = build(given)
    parameters = sum(torch.Size(shape).numel() for shape in engine.parameter_shapes().values())
    vocabulary = next(shape[0] for name, shape in engine.parameter_shapes().items() if "embed" in name)
    rows = make_rows(given.tokens // given.segment, given.segment, vocabulary)
    counts, micro = engine.counts(rows), MicroBatching(max_tokens=given.tokens)
    ours = seconds(
        lambda: engine.update(rows, NegativeLogProb(), temperature=1.0, micro=micro, counts=counts),
        given.repeat,
        given.device,
    )
    plain = load_causal_lm(given.model, dtype=dtype, device=given.device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6, fused=True)
    ids = torch.cat([rows["prompt_ids"], rows["response_ids"]], 1).to(given.device)

    def by_hand() -> None:
        logits = plain(ids[:, :-1], use_cache=False).logits.float()
        torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).mean().neg().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    theirs = seconds(by_hand, given.repeat, given.device)
    for name, taken in (("hybridflow", ours), ("plain loop", theirs)):
        flops = 6 * parameters * given.tokens / taken
        print(
            f"{name:12s} {taken:8.3f} s  {given.tokens / taken:9.0f} tokens/s  "
            f"{flops / 1e9:9.1f} GFLOP/s  {flops / ceiling:5.2f} of {ceiling / 1e9:.0f} GFLOP/s"
        )
    print(f"hybridflow / plain loop: {ours / theirs:.3f} of the time")
    lengths = torch.randint(16, 4096, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    costs = [row_cost(length) for length in lengths]
    start = time.perf_counter()
    sums = [sum(costs[i] for i in part) for part in balance(costs, 64, equal_counts=True)]
    taken = time.perf_counter() - start
    print(f"balance of 4096 rows over 64: {1e3 * taken:.1f} ms, max/mean {max(sums) * 64 / sum(sums):.4f}")


if __name__ == "__main__":
    main()
