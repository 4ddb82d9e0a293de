"""What a machine without Ray, without vLLM and without every other extra can do: train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.jobs import read_metrics

REPO = Path(__file__).resolve().parents[2]
EXTRAS = (
    "liger_kernel",
    "math_verify",
    "matplotlib",
    "peft",
    "pyarrow",
    "ray",
    "reasoning_gym",
    "tensorboard",
    "vllm",
    "wandb",
)
ABSENT = f"""
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def without_extras(name, path=None, target=None):
    return None if name.partition(".")[0] in {EXTRAS!r} else find(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(without_extras)
"""
"""Read by every Python that starts: the command starts itself once more, with the variables of its plan."""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of hybridflow where no extra is installed."""
    (folder / "sitecustomize.py").write_text(ABSENT)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{REPO}"}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


def test_the_core_alone_trains_without_ray_and_vllm(tmp_path):
    sizes = ["data.train_batch_size=16", "data.generated_val_size=16", "trainer.total_training_steps=1"]
    alone = ["trainer.controller=local", "actor_rollout_ref.rollout.name=hf", "trainer.default_local_dir=run"]
    done = command(tmp_path, "hybridflow.main_ppo", *alone, *sizes)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1]


def test_what_needs_an_extra_says_so_before_anything_starts(tmp_path):
    done = command(tmp_path, "hybridflow.main_ppo", "trainer.logger=[console,wandb]")
    assert done.returncode == 3
    for words in (
        "package ray is not installed. Install hybridflow[ray]",
        "package vllm is not",
        "package wandb is not",
    ):
        assert words in done.stderr
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    done = command(tmp_path, "hybridflow.report", ".")
    assert done.returncode == 2 and "matplotlib is not installed: install hybridflow[trackers]" in done.stderr
