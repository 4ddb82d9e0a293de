"""Prefix sharing through the main job: the same numbers, fewer tokens."""

from __future__ import annotations

import pytest

from tests.jobs import run_job

ACTOR = "actor_rollout_ref.actor"
SAME = ("actor/grad_norm", "actor/loss", "actor/kl_loss", "actor/entropy_old", "critic/loss", "critic/values/mean")


def test_a_job_with_shared_prompts_has_the_same_metrics(tmp_path):
    options = {"algorithm.adv_estimator": "gae", f"{ACTOR}.use_kl_loss": True}
    plain = run_job(tmp_path / "plain", **options)
    shared = run_job(
        tmp_path / "shared", **options, **{f"{ACTOR}.use_prefix_grouper": True, "critic.use_prefix_grouper": True}
    )
    for one, two in zip(plain, shared, strict=True):
        for name in SAME:
            assert two[name] == pytest.approx(one[name], abs=1e-4), name
        # The trainer's log-probs behind a shared prompt are those of the sampler.
        assert two["training/rollout_log_prob_diff/max"] < 1e-4
