"""Law: the main job gives the same metrics at every layout of its training roles.

PPO (critic, reference, KL in the reward) and GRPO (reference, KL and entropy in the loss), two steps of two optimizer
steps each, float32; with the plain generator, and PPO as ``python -m hybridflow.main_ppo`` with vLLM on one and on two
tensor-parallel ranks. Everything but times and transfers must agree within 1e-4: rounding of sums in another order,
which AdamW's first steps enlarge where a gradient is nearly 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.invariants.parallel_jobs import JOBS, overrides
from tests.jobs import read_metrics

COSTS = ("timing_s/", "perf/", "publish/", "residency/")
"""Metrics that say how something was done."""


def _run(layout: str, folder: Path, jobs: Sequence[str] = tuple(JOBS)) -> dict[str, list[dict[str, Any]]]:
    """Metrics by job and step."""
    command = [sys.executable, "-m", "tests.invariants.parallel_jobs", layout, str(folder), *jobs]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {job: read_metrics(folder / job) for job in jobs}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return _run("one", tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def one_with_vllm(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _run_main_ppo("one", 1, tmp_path_factory.mktemp("one_with_vllm"))


def _run_main_ppo(layout: str, rollout_tp: int, folder: Path) -> list[dict[str, Any]]:
    """Metrics by step of PPO on the command line."""
    command = [sys.executable, "-m", "hybridflow.main_ppo", *overrides(layout, rollout_tp, folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_metrics(folder)


def _assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == 2 and len(other) == 2
    for want, got in zip(one, other, strict=True):
        names = {name for name in want if not name.startswith(COSTS)}
        assert names == {name for name in got if not name.startswith(COSTS)}
        assert want["actor/grad_norm"] > 0 and want["actor/optimizer_steps"] == 2
        differing = {
            name: (want[name], got[name]) for name in names if got[name] != pytest.approx(want[name], abs=1e-4)
        }
        assert not differing, f"step {want['step']}"


def test_ppo_on_two_ranks_has_the_metrics_of_one_and_every_role_says_what_it_cost(tmp_path):
    one, two = (_run(layout, tmp_path / layout, ["gae"])["gae"] for layout in ("one", "dp2"))
    _assert_same(one, two)
    _assert_costs(two[1])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "pp2 torch_1f1b", "pp2 torch_gpipe", "sp2"])
def test_metrics_are_those_of_one_process(layout, one, tmp_path):
    found = _run(layout, tmp_path)
    for job, steps in one.items():
        _assert_same(steps, found[job])
    _assert_costs(found["gae"][1])


def _assert_costs(step: dict[str, Any]) -> None:
    """Every role of a job on two ranks says what it cost."""
    for role in ("actor", "critic", "reference"):
        assert 0 < step[f"perf/mfu/{role}"] < 1.5  # the peak of a busy machine is a measurement itself
        assert step[f"perf/tokens_per_second_per_device/{role}"] > 0
        assert 0 <= step[f"perf/padding_share/{role}"] < 0.5
        assert 1 <= step[f"perf/imbalance/{role}"] <= 2
        assert step[f"perf/communication_s/{role}"] > 0
    assert step["perf/mfu/rollout"] > 0 and step["perf/tokens_per_second_per_device/rollout"] > 0
    assert 1 <= step["perf/imbalance/rollout"] <= 2
    for role in ("actor", "critic", "reference", "rollout", "reward", "weights"):
        parts = [step[f"perf/{part}_s/{role}"] for part in ("compute", "communication", "idle")]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(step["timing_s/step"])
    for phase in (
        *("generate_sequences", "compute_reward", "compute_log_prob", "compute_ref_log_prob", "compute_values"),
        *("compute_advantage", "update_actor", "update_critic", "publish"),
    ):
        assert step[f"perf/max_memory_gb/{phase}"] > 0.05


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("rollout_tp", [1, 2])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "sp2"])
def test_metrics_with_vllm_are_those_of_one_process(layout, rollout_tp, one_with_vllm, tmp_path):
    _assert_same(one_with_vllm, _run_main_ppo(layout, rollout_tp, tmp_path))
