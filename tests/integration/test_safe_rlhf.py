"""Safe-RLHF in the main job: two critics, a multiplier that learns, is logged and is saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.problems import InvalidConfigError
from hybridflow.utils.errors import ColumnError
from tests.jobs import run_job, small_config

SAFE: dict[str, Any] = {
    "algorithm.safe_rlhf.enable": True,
    "reward.custom_reward_function.path": str(Path(__file__).parent / "reward_with_cost.py"),
}
GAE: dict[str, Any] = {"algorithm.adv_estimator": "gae", "actor_rollout_ref.rollout.n": 1}
LIMIT = "algorithm.safe_rlhf.cost_limit"


def test_with_a_critic_a_second_one_learns_the_cost(tmp_path):
    steps = run_job(tmp_path, **SAFE, **GAE)
    assert len(steps) == 2
    for step in steps:
        assert step["cost_critic/optimizer_steps"] == step["critic/optimizer_steps"] == 2
        assert step["cost_critic/grad_norm"] > 0 and math.isfinite(step["cost_critic/vf_loss"])
        assert step["cost_critic/vf_loss"] != step["critic/vf_loss"]
        assert 0 <= step["safe_rlhf/cost/mean"] <= 1


def test_without_a_critic_costs_are_credited_as_rewards_are(tmp_path):
    steps = run_job(tmp_path, **SAFE)
    assert all(step["actor/grad_skipped"] == 0 and "cost_critic/vf_loss" not in step for step in steps)
    assert any(step["actor/grad_norm"] > 0 for step in steps)


@pytest.mark.parametrize(("limit", "rises"), [(-1.0, True), (2.0, False)])
def test_the_multiplier_rises_when_costs_exceed_the_limit_and_falls_when_they_do_not(tmp_path, limit, rises):
    first, second = run_job(tmp_path, **SAFE, **{LIMIT: limit})
    assert first["safe_rlhf/multiplier"] == pytest.approx(1.0)
    expected = math.exp(0.1 * 1.0 * (first["safe_rlhf/cost/mean"] - limit))  # arXiv:2310.12773, equation 31
    assert second["safe_rlhf/multiplier"] == pytest.approx(expected)
    assert (second["safe_rlhf/multiplier"] > 1) == rises


def test_the_multiplier_goes_on_where_a_checkpoint_left_it(tmp_path):
    whole = run_job(tmp_path / "whole", **SAFE, **{LIMIT: -1.0, "trainer.total_training_steps": 3})
    part = {LIMIT: -1.0, "trainer.save_freq": 1}
    run_job(tmp_path / "part", **SAFE, **part, **{"trainer.total_training_steps": 2})
    resumed = run_job(tmp_path / "part", **SAFE, **part, **{"trainer.total_training_steps": 3})
    assert [step["step"] for step in resumed] == [1, 2, 3]
    assert resumed[2]["safe_rlhf/multiplier"] == whole[2]["safe_rlhf/multiplier"]
    assert resumed[2]["actor/grad_norm"] == whole[2]["actor/grad_norm"]


def test_the_size_of_the_cost_and_of_the_multiplier_reach_the_update(tmp_path):
    norms = {
        multiplier: run_job(
            tmp_path / str(multiplier),
            **SAFE,
            **{"algorithm.safe_rlhf.multiplier_init": multiplier, "algorithm.safe_rlhf.multiplier_lr": 0.0},
            **{"trainer.total_training_steps": 1},
        )[0]["actor/grad_norm"]
        for multiplier in (0.0, 1.0, 100.0)
    }
    assert len(set(norms.values())) == 3, norms


def test_a_reward_function_without_a_cost_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ColumnError, match="'cost'.*reward function"):
        run_job(tmp_path, **{"algorithm.safe_rlhf.enable": True})


@pytest.mark.parametrize("estimator", ["remax", "gdpo"])
def test_estimators_that_cannot_credit_a_cost_are_refused(tmp_path, estimator):
    more = {"algorithm.gdpo_reward_keys": ["cost"]} if estimator == "gdpo" else {}
    with pytest.raises(InvalidConfigError, match="a cost has none"):
        small_config(tmp_path, **SAFE, **more, **{"algorithm.adv_estimator": estimator})
