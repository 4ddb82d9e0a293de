"""Costs of a step from what the ranks of its pools say."""

from __future__ import annotations

import pytest

from hybridflow.roles.profiles import CallCost, Generated, StepCosts
from hybridflow.trainer.costs import cost_metrics


def call(role: str, method: str, seconds: float, communication: float, gigabytes: float) -> CallCost:
    return CallCost(
        role=role,
        method=method,
        seconds=seconds,
        communication_seconds=communication,
        peak_bytes=int(gigabytes * 1e9),
    )


def test_compute_communication_and_idle_of_a_role_add_up_to_the_step():
    slow = call("actor", "update_actor", 2.0, 0.5, 3), call("rollout", "generate", 1.0, 0, 1)
    fast = call("actor", "update_actor", 1.0, 0.1, 4), call("rollout", "generate", 1.0, 0, 2)
    ranks = [StepCosts(calls=calls, metrics={}) for calls in (slow, fast)]
    other = [StepCosts(calls=(call("critic", "update_critic", 4.0, 1.0, 5),), metrics={"perf/mfu/x": 0.5})]
    found = cost_metrics([ranks, other], step_seconds=5.0)
    assert found["perf/compute_s/actor"] == pytest.approx(1.2)
    assert found["perf/communication_s/actor"] == pytest.approx(0.3)
    assert found["perf/idle_s/actor"] == pytest.approx(3.5)
    for role in ("actor", "rollout", "critic"):
        parts = [found[f"perf/{part}_s/{role}"] for part in ("compute", "communication", "idle")]
        assert sum(parts) == pytest.approx(5.0)
    assert found["perf/max_memory_gb/update_actor"] == pytest.approx(4.0)
    assert found["perf/mfu/x"] == 0.5


def test_the_cost_critics_phases_have_names_of_their_own():
    ranks = [
        StepCosts(
            calls=(call("critic", "update_critic", 1, 0, 1), call("cost_critic", "update_critic", 1, 0, 2)), metrics={}
        )
    ]
    found = cost_metrics([ranks], step_seconds=3.0)
    assert found["perf/max_memory_gb/update_critic"] == pytest.approx(1.0)
    assert found["perf/max_memory_gb/cost_update_critic"] == pytest.approx(2.0)


def test_a_generators_numbers_are_those_of_all_its_ranks():
    """Two ranks, the second of which has twice the work: 300 tokens in 2 x 2 device seconds, 3 of them at work."""
    ranks = [
        StepCosts(
            calls=(), metrics={}, generated=Generated(tokens=100.0 * n, flops=10.0 * n, seconds=n, peak_flops=50.0)
        )
        for n in (1, 2)
    ]
    found = cost_metrics([[StepCosts(calls=(), metrics={})], ranks], step_seconds=3.0)
    assert found == pytest.approx(
        {
            "perf/tokens_per_second_per_device/rollout": 75.0,
            "perf/mfu/rollout": 30.0 / 4 / 50,
            "perf/imbalance/rollout": 4 / 3,
        }
    )
