"""Runs small main jobs at one layout, one after the other, and leaves their metrics: arguments LAYOUT FOLDER JOB...

Also watched: the rows that ranks keep for a step are gone when it ends.

A program of its own: the ranks of a local group are processes of a fork server, which needs a guarded main module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.batch.batch import Batch
from hybridflow.single_controller import health
from hybridflow.single_controller.segments import segments_of
from hybridflow.trainer.ppo import PPOTrainer
from hybridflow.trainer.run import Run
from tests.jobs import SMALL, run_job

ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
TRAINED = ("actor_rollout_ref.actor", "critic")
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp2": {},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "pp2 torch_1f1b": {"pipeline_parallel_size": 2},
    "pp2 torch_gpipe": {"pipeline_parallel_size": 2},
    "sp2": {"ulysses_sequence_parallel_size": 2},
}
JOBS: dict[str, dict[str, Any]] = {
    "grpo": {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.entropy_coeff": 0.01},
    "gae": {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True},
}


def options(layout: str) -> dict[str, Any]:
    """Degrees of every training role, its pipeline schedule, and the ranks."""
    degrees: dict[str, Any] = {f"{role}.{name}": size for role in ROLES for name, size in LAYOUTS[layout].items()}
    schedule = layout.partition(" ")[2] or "1f1b"
    degrees |= {f"{role}.pipeline_schedule": schedule for role in TRAINED}
    return {**degrees, "trainer.n_gpus_per_node": 1 if layout == "one" else 2, "trainer.threads_per_worker": 1}


def overrides(layout: str, rollout_tp: int, folder: Path) -> list[str]:
    """PPO with vLLM, as arguments of ``main_ppo``."""
    rollout = "actor_rollout_ref.rollout"
    generator = {f"{rollout}.name": "vllm", f"{rollout}.tensor_model_parallel_size": rollout_tp}
    given = {**SMALL, **JOBS["gae"], **options(layout), **generator, f"{rollout}.dtype": "float32"}
    given["trainer.default_local_dir"] = str(folder)
    return [f"{key}={value}".replace("'", "").replace(" ", "") for key, value in given.items()]


def run_layout(layout: str, folder: Path, jobs: Sequence[str]) -> None:
    """Runs ``jobs`` of ``JOBS`` at ``layout``, each into ``folder/<job>``."""
    watch_kept_rows()
    for name in jobs:
        run_job(folder / name, **JOBS[name], **options(layout))


def watch_kept_rows() -> None:
    """From now on a step that leaves rows of its batch behind, or keeps none although it has ranks, is an error."""
    learn, after = PPOTrainer.learn, Run.after

    def kept() -> list[Path]:
        return segments_of([os.getpid(), *health.descendants([os.getpid()])])

    def learning(trainer: PPOTrainer, batch: Batch, step: int) -> None:
        assert bool(kept()) == (trainer.config.trainer.n_gpus_per_node > 1)
        learn(trainer, batch, step)

    def leaving(run: Run, step: int) -> None:
        assert kept() == []
        after(run, step)

    PPOTrainer.learn, Run.after = learning, leaving


if __name__ == "__main__":
    run_layout(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
