"""Every name that real jobs write is in the one table of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

import hybridflow
from hybridflow.trainer.metric_table import SECTIONS, describe
from tests.jobs import run_job

GAE = {"algorithm.adv_estimator": "gae", "actor_rollout_ref.rollout.n": 1, "algorithm.use_kl_in_reward": True}
VALIDATED = {"trainer.val_before_train": True, "trainer.save_freq": 1, "actor_rollout_ref.rollout.val_kwargs.n": 2}
JOBS = {
    "grpo": {**VALIDATED, "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.entropy_coeff": 0.01},
    "ppo": GAE,
    "dapo": {
        "algorithm.filter_groups.enable": True,
        "reward.overlong.enable": True,
        "reward.overlong.len": 2,
        "reward.overlong.log": True,
    },
    "corrected": {
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
        "algorithm.rollout_correction.guard_max_log_ratio": 1.0,
    },
    "bypass": {
        "algorithm.rollout_correction.bypass_mode": True,
        "algorithm.rollout_correction.loss_type": "reinforce",
        "algorithm.rollout_correction.rollout_is": "token",
    },
    "clip_cov": {"actor_rollout_ref.actor.policy_loss.loss_mode": "clip_cov"},
    "shaped": {
        "algorithm.reward_shaping.normalize": True,
        "algorithm.gdpo_reward_keys": ["exact", "short"],
        "reward.custom_reward_function.path": str(Path(__file__).parent / "reward_of_two_components.py"),
    },
    "safe": {
        **GAE,
        "algorithm.safe_rlhf.enable": True,
        "reward.custom_reward_function.path": str(Path(__file__).parent / "reward_with_cost.py"),
    },
    "ptx": {"algorithm.ptx_coef": 0.1, "algorithm.ptx_files": [str(Path(__file__).parent / "text.txt")]},
}


@pytest.mark.parametrize("name", JOBS)
def test_every_name_that_a_job_writes_is_in_the_table(tmp_path, name):
    steps = run_job(tmp_path, **JOBS[name])
    written = {metric for step in steps for metric in step}
    assert len(written) > 50
    assert sorted(metric for metric in written if describe(metric) is None) == []


def test_every_line_names_a_file_that_exists_and_stands_once():
    lines = [line for section in SECTIONS.values() for line in section]
    root = Path(hybridflow.__file__).parent
    assert sorted({line.source for line in lines if not (root / line.source).is_file()}) == []
    assert len({line.name for line in lines}) == len(lines)


def test_a_name_that_nobody_documents_is_not_found():
    assert describe("actor/unheard_of") is None
    assert describe("val-core/hybridflow/arithmetic/reward/mean_at_4") is not None
