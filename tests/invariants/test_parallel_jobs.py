"""Law: the main job gives the same metrics at every layout of its training roles.

PPO (critic, reference, KL in the reward) and GRPO (reference, KL and entropy in the loss), two steps of two optimizer
steps each, float32. Everything but times and transfers must agree within 1e-4: rounding of sums in another order, which
AdamW's first steps enlarge where a gradient is nearly 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.invariants.parallel_jobs import JOBS
from tests.jobs import read_metrics

COSTS = ("timing_s/", "perf/", "publish/", "residency/")
"""Metrics that say how something was done."""


def _run(layout: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Metrics by job and step."""
    command = [sys.executable, "-m", "tests.invariants.parallel_jobs", layout, str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {job: read_metrics(folder / job) for job in JOBS}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return _run("one", tmp_path_factory.mktemp("one"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "sp2"])
def test_metrics_are_those_of_one_process(layout, one, tmp_path):
    found = _run(layout, tmp_path)
    for job, steps in one.items():
        assert len(steps) == 2 and len(found[job]) == 2
        for want, got in zip(steps, found[job], strict=True):
            names = {name for name in want if not name.startswith(COSTS)}
            assert names == {name for name in got if not name.startswith(COSTS)}
            assert want["actor/grad_norm"] > 0 and want["actor/optimizer_steps"] == 2
            differing = {
                name: (want[name], got[name]) for name in names if got[name] != pytest.approx(want[name], abs=1e-4)
            }
            assert not differing, f"{job} step {want['step']}"
