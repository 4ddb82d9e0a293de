"""Where every token is trained once by the policy that sampled it, the pass for old log-probs changes nothing."""

from __future__ import annotations

import pytest

from tests.jobs import run_job

ONE_UPDATE = {"actor_rollout_ref.actor.ppo_mini_batch_size": 8, "trainer.total_training_steps": 2}
SAME = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/pg_clipfrac")


def test_leaving_out_the_pass_gives_the_same_updates(tmp_path):
    without = run_job(tmp_path / "without", **ONE_UPDATE)
    # A guard that never fires asks for old log-probs and does nothing with them.
    guard = {"algorithm.rollout_correction.guard_max_log_ratio": 1e9}
    with_pass = run_job(tmp_path / "with", **ONE_UPDATE, **guard)
    assert all("timing_s/old_log_prob" not in step for step in without)
    assert all("timing_s/old_log_prob" in step for step in with_pass)
    for mine, theirs in zip(without, with_pass, strict=True):
        for name in SAME:
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5), name
        assert mine["training/rollout_log_prob_diff/max"] < 1e-4
        assert mine["actor/entropy"] == pytest.approx(theirs["actor/entropy_old"], abs=1e-4)


def test_two_mini_batches_bring_the_pass_back(tmp_path):
    steps = run_job(tmp_path, **{"actor_rollout_ref.actor.ppo_mini_batch_size": 4})
    assert all("timing_s/old_log_prob" in step for step in steps)
