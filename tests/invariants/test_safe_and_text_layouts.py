"""Law: costs, their critic and text in the update give the same metrics at every layout.

Two steps of two optimizer steps, float32. Everything but times and transfers must agree within 1e-4: rounding of sums
in another order, which AdamW's first steps enlarge where a gradient is nearly 0. Five blocks of text over two ranks:
uneven on purpose.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import read_metrics

COSTS = ("timing_s/", "perf/", "publish/", "residency/")
"""Metrics that say how something was done."""


def _run(layout: str, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.invariants.safe_and_text_jobs", layout, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_metrics(folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _run("one", tmp_path_factory.mktemp("one"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_metrics_are_those_of_one_process(layout, one, tmp_path):
    found = _run(layout, tmp_path)
    assert len(one) == len(found) == 2
    for want, got in zip(one, found, strict=True):
        names = {name for name in want if not name.startswith(COSTS)}
        assert {"actor/ptx_loss", "cost_critic/vf_loss", "safe_rlhf/multiplier"} <= names
        differing = {
            name: (want[name], got.get(name)) for name in names if got[name] != pytest.approx(want[name], abs=1e-4)
        }
        assert not differing, f"step {want['step']}"
