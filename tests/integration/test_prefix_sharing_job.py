"""Prefix sharing through the main job: the same numbers, fewer tokens."""

from __future__ import annotations

import pytest

from tests.jobs import run_job

ACTOR = "actor_rollout_ref.actor"
SAME = ("actor/grad_norm", "actor/loss", "actor/entropy", "critic/loss", "training/rollout_log_prob_diff/max")


def test_a_job_with_shared_prompts_has_the_same_metrics(tmp_path):
    options = {"algorithm.adv_estimator": "gae", f"{ACTOR}.use_kl_loss": True}
    plain = run_job(tmp_path / "plain", **options)
    shared = run_job(
        tmp_path / "shared", **options, **{f"{ACTOR}.use_prefix_grouper": True, "critic.use_prefix_grouper": True}
    )
    for one, two in zip(plain, shared, strict=True):
        compared = [name for name in SAME if name in one]
        assert len(compared) >= 3
        for name in compared:
            assert two[name] == pytest.approx(one[name], abs=1e-4), name
    assert shared[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
