"""A run that dies after any step and is started again equals the run that never died, bit for bit.

Weights, moments, data position, random streams, KL coefficient, reward statistics and every line of ``metrics.jsonl``;
only times, speeds and memory may differ. Synchronous trainer, CPU, same ranks and threads.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.engines.train.shards import read, read_index
from hybridflow.trainer.checkpoint import CheckpointStore
from hybridflow.trainer.run import Run
from tests.faults.job import start_job
from tests.faults.out_of_memory import memory_ends
from tests.jobs import read_metrics, run_job

STEPS = 5
COSTS = str(Path(__file__).parents[1] / "integration" / "reward_with_cost.py")
RUN: dict[str, Any] = {
    "data.train_batch_size": 4,
    "data.generated_size": 10,  # two batches: the run is in its third epoch when it ends
    "data.generated_val_size": 8,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": 2,
    "trainer.test_freq": 3,
    "trainer.val_before_train": True,
    "actor_rollout_ref.actor.optim.lr": 2e-4,
}
GRPO: dict[str, Any] = RUN | {
    "actor_rollout_ref.actor.shuffle": True,
    "actor_rollout_ref.actor.ppo_epochs": 2,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "actor_rollout_ref.actor.use_kl_loss": True,
}
PPO: dict[str, Any] = RUN | {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 100,
    "algorithm.reward_shaping.normalize": True,
    "actor_rollout_ref.actor.shuffle": True,
    "actor_rollout_ref.actor.ppo_epochs": 2,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "critic.optim.lr": 1e-3,
    "critic.optim.lr_scheduler_type": "linear",
    "trainer.critic_warmup": 1,
}
ASYNC: dict[str, Any] = {
    "actor_rollout_ref.actor.checkpoint.async_save": True,
    "critic.checkpoint.async_save": True,
}
TWO_RANKS: dict[str, Any] = {"trainer.n_gpus_per_node": 2}
MEASURED = (
    "timing_s/",
    "residency/",
    "perf/straggler",
    "perf/driver_bytes",  # references of rows name the processes that keep them
    "perf/compute_s",
    "perf/communication_s",
    "perf/idle_s",
    "perf/imbalance/rollout",
    "perf/max_memory",
    "perf/mfu",
    "perf/tokens_per_second",
    "perf/throughput",
)


FIRST_UPDATE, MORE_THAN_A_PROMPT = 8, 20
"""Number of the pass of an MLP, over so many tokens, that is the first with a gradient."""


class Died(BaseException):
    """Stands for kill -9: nothing handles it."""


@contextmanager
def dying_after(step: int) -> Iterator[None]:
    """Runs inside end behind everything that belongs to ``step``."""
    after = Run.after

    def dying(run: Run, done: int) -> None:
        after(run, done)
        if done == step:
            raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "after", dying)
        with pytest.raises(Died):
            yield


def lines(folder: Path) -> list[dict[str, Any]]:
    """Metrics by step without what a clock or an allocator measures."""
    return [{name: value for name, value in row.items() if not _is_measured(name)} for row in read_metrics(folder)]


def _is_measured(name: str) -> bool:
    return name.startswith(MEASURED) or "seconds" in name or name == "perf/time_per_step"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of one role in a checkpoint."""
    index = read_index(str(folder))
    state = {name: torch.zeros(meta.size, dtype=meta.properties.dtype) for name, meta in index.items()}
    read(str(folder), state)
    return state


def assert_same_end(whole: Path, resumed: Path, *, but: tuple[str, ...] = ()) -> None:
    """``but``: metrics that may differ."""
    assert [row["step"] for row in read_metrics(resumed)] == list(range(STEPS + 1)), "a line is lost or there twice"
    for one, two in zip(lines(whole), lines(resumed), strict=True):
        names = {*one, *two} - {*but}
        differing = {name: (one.get(name), two.get(name)) for name in names if one.get(name) != two.get(name)}
        assert not differing, f"step {one['step']}"
    last = f"global_step_{STEPS}"
    alarms = [json.loads((folder / last / "trainer_state.json").read_text())["alarms"] for folder in (whole, resumed)]
    assert alarms[0] == alarms[1] and alarms[0]["first_entropies"], "what the warnings remember is not the same"
    for role in [path.name for path in (whole / last).iterdir() if path.is_dir()]:
        one, two = tensors(whole / last / role), tensors(resumed / last / role)
        assert one.keys() == two.keys() and any(name.startswith("optim/") for name in one)
        assert [name for name in one if not torch.equal(one[name], two[name])] == []


def assert_resumes(folder: Path, options: dict[str, Any], stops: tuple[int, ...]) -> None:
    """Stopped behind any of ``stops`` and started again, the job ends as it does undisturbed."""
    run_job(folder / "whole", **options)
    for stop in stops:
        again = folder / f"stopped_{stop}"
        with dying_after(stop):
            run_job(again, **options)
        run_job(again, **options)
        assert_same_end(folder / "whole", again)


@pytest.mark.parametrize(
    ("options", "stop"),
    [(GRPO, 3), (GRPO | ASYNC, 4), (PPO, 3), (PPO | ASYNC, 4)],
    ids=["grpo-sync", "grpo-async", "ppo-sync", "ppo-async"],
)
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tmp_path, options, stop):
    """Step 3 is behind the last checkpoint, step 4 has one of its own."""
    assert_resumes(tmp_path, options, stops=(stop,))


@pytest.mark.slow
@pytest.mark.parametrize("options", [GRPO, GRPO | ASYNC, PPO, PPO | ASYNC])
@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["1", "2"])
def test_that_holds_for_every_step(tmp_path, options, ranks):
    assert_resumes(tmp_path, options | ranks, stops=(1, 2, 3, 4))


def test_a_run_that_dies_right_behind_its_checkpoint_has_the_line_of_that_step(tmp_path):
    complete = CheckpointStore.complete

    def dying(store: CheckpointStore, step: int, state: Any, **options: Any) -> None:
        complete(store, step, state, **options)
        raise Died

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Died):
        patch.setattr(CheckpointStore, "complete", dying)
        run_job(tmp_path / "again", **GRPO)
    newest = CheckpointStore(tmp_path / "again").newest()
    assert newest is not None and newest.step == 2
    run_job(tmp_path / "again", **GRPO)
    run_job(tmp_path / "whole", **GRPO)
    assert_same_end(tmp_path / "whole", tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("options", [GRPO | ASYNC, PPO], ids=["grpo-async", "ppo"])
def test_two_ranks_resume_as_one_does(tmp_path, options):
    assert_resumes(tmp_path, options | TWO_RANKS, stops=(3,))


def test_a_run_that_dies_twice_still_ends_the_same(tmp_path):
    run_job(tmp_path / "whole", **PPO)
    for stop in (2, 4):
        with dying_after(stop):
            run_job(tmp_path / "again", **PPO)
    run_job(tmp_path / "again", **PPO)
    assert_same_end(tmp_path / "whole", tmp_path / "again")


def test_micro_batches_stay_as_small_as_a_shortage_has_made_them(tmp_path):
    """How rows are cut decides how sums are rounded: with its first budget the resumed run would have other bits."""
    memory = {"call": FIRST_UPDATE, "where": "backward", "above_tokens": MORE_THAN_A_PROMPT}
    with memory_ends(**memory):
        run_job(tmp_path / "whole", **GRPO)
    with memory_ends(**memory), dying_after(2):
        run_job(tmp_path / "again", **GRPO)
    run_job(tmp_path / "again", **GRPO)
    assert [step.get("actor/out_of_memory") for step in read_metrics(tmp_path / "again")] == [None, 1, 0, 0, 0, 0]
    assert_same_end(tmp_path / "whole", tmp_path / "again")


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 2},
        {"algorithm.adv_estimator": "remax"},
        {"actor_rollout_ref.actor.optim.optimizer": "torch.optim.SGD"},
        {
            "algorithm.adv_estimator": "gae",
            "algorithm.safe_rlhf.enable": True,
            "reward.custom_reward_function.path": COSTS,
        },
    ],
    ids=["dynamic sampling", "remax", "an optimizer without moments", "safe rlhf"],
)
def test_other_dataflows_resume_too(tmp_path, options):
    options = GRPO | options
    run_job(tmp_path / "whole", **options)
    with dying_after(3):
        run_job(tmp_path / "again", **options)
    run_job(tmp_path / "again", **options)
    assert lines(tmp_path / "whole") == lines(tmp_path / "again")


@pytest.mark.vllm
def test_the_law_holds_with_vllm(tmp_path):
    """Each job in a process of its own, two at a time; one is killed behind step 3."""
    options = GRPO | ASYNC | {"actor_rollout_ref.rollout.name": "vllm", "trainer.threads_per_worker": 1}

    def start(name: str, *, die_after: int = 0) -> tuple[subprocess.Popen[str], int]:
        return start_job(tmp_path / name, options, die_after=die_after), -signal.SIGKILL if die_after else 0

    for starts in ({"whole": 0, "again": 3}, {"again": 0}):
        jobs = [start(name, die_after=step) for name, step in starts.items()]
        for job, expected in jobs:
            output = job.communicate(timeout=280)[0]
            assert job.returncode == expected, output
    assert_same_end(tmp_path / "whole", tmp_path / "again")


def test_the_comparison_notices_a_lost_moment(tmp_path, monkeypatch):
    """Negative control: without the optimizer's state the law does not hold."""
    with_loss = PPO | {"actor_rollout_ref.actor.checkpoint.load_contents": ["model", "extra"]}
    run_job(tmp_path / "whole", **PPO)
    with dying_after(4):
        run_job(tmp_path / "again", **PPO)
    run_job(tmp_path / "again", **with_loss)
    assert lines(tmp_path / "whole")[:5] == lines(tmp_path / "again")[:5]
    with pytest.raises(AssertionError):
        assert_same_end(tmp_path / "whole", tmp_path / "again")
