"""Small real jobs, run in this process: the main job on the embedded task with one rank, without Ray and vLLM."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig
from hybridflow.launch.build import run
from hybridflow.launch.machine import inspect_machine
from hybridflow.launch.preflight import plan_run

SMALL: dict[str, Any] = {
    "data.train_batch_size": 8,
    "data.generated_val_size": 16,
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "trainer.controller": "local",
    "trainer.logger": ["jsonl"],
    "trainer.total_training_steps": 2,
    "trainer.val_before_train": False,
}
"""A job of two steps that takes about a second."""
this_machine = cache(inspect_machine)
"""Inspected once for all jobs: each look at how busy it is takes a fifth of a second, half of a small job."""


def small_config(folder: Path, **overrides: Any) -> PPOConfig:
    """``SMALL`` with ``overrides`` (dotted keys, written with ``__`` for dots or handed as a dict with ``**``)."""
    chosen = {**SMALL, "trainer.default_local_dir": str(folder)}
    chosen |= {name.replace("__", "."): value for name, value in overrides.items()}
    tree: dict[str, Any] = {}
    for key, value in chosen.items():
        *parents, leaf = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return load_config(tree)


def run_job(folder: Path, **overrides: Any) -> list[dict[str, Any]]:
    """Metrics by step of one finished job."""
    config = small_config(folder, **overrides)
    assert run(config, plan_run(config, this_machine())) == 0
    return read_metrics(folder)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
