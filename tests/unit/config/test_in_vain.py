from __future__ import annotations

import pytest

from hybridflow.config.in_vain import READERS, set_in_vain
from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import leaf_names
from hybridflow.launch.preflight import plan_run
from tests.unit.config.trees import tree

ACTOR = "actor_rollout_ref.actor"
IDLE = [
    (("algorithm.lam=0.95",), "algorithm.lam=0.95: read with algorithm.adv_estimator=gae only"),
    (("algorithm.passk=4",), "algorithm.passk=4: read with algorithm.adv_estimator=grpo_passk only"),
    (
        (f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.kl_loss_type=k1"),
        f"{ACTOR}.kl_loss_coef=0.1, {ACTOR}.kl_loss_type=k1: read with {ACTOR}.use_kl_loss=True only",
    ),
    (("algorithm.kl_ctrl.kl_coef=0.1",), "read with algorithm.use_kl_in_reward=True only"),
    ((f"{ACTOR}.policy_loss.tau_pos=2",), "loss_mode=sapo only"),
    ((f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.clip_ratio=0.1"), f"{ACTOR}.clip_ratio=0.1: read with"),
    ((f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-sum"), "a loss of tokens"),
    (("algorithm.rollout_correction.rollout_is_threshold=3",), "rollout_is=token|sequence only"),
    (("reward.overlong.len=4",), "reward.overlong.enable=True only"),
]
READ = [
    ("algorithm.adv_estimator=gae", "algorithm.lam=0.95", "algorithm.gamma=0.9"),
    ("algorithm.adv_estimator=json:loads", "algorithm.lam=0.95", "algorithm.passk=3"),
    (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1"),
    (f"{ACTOR}.policy_loss.loss_mode=json:loads", f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.policy_loss.dro_beta=3"),
    (f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-sum", f"{ACTOR}.entropy_coeff=0.1"),
    ("algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_is_threshold=3"),
    ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=10"),
]


@pytest.mark.parametrize(("overrides", "words"), IDLE, ids=lambda value: str(value[0])[:40])
def test_a_key_that_the_chosen_algorithm_does_not_read_is_answered_with_a_note(overrides, words):
    config = load_config(tree(*overrides))
    (said,) = set_in_vain(config)
    assert words in said
    assert said in plan_run(config).notes


@pytest.mark.parametrize("overrides", READ, ids=lambda value: value[-1])
def test_a_key_that_is_read_is_not_mentioned(overrides):
    assert list(set_in_vain(load_config(tree(*overrides)))) == []


def test_the_defaults_and_their_names():
    assert list(set_in_vain(PPOConfig())) == []
    assert set(READERS) <= set(leaf_names(PPOConfig))


def test_a_critic_whose_values_nobody_reads_is_told():
    def said(*overrides: str) -> bool:
        return any("reads no values" in note for note in plan_run(load_config(tree(*overrides))).notes)

    assert said("critic.enable=True")
    assert not said("critic.enable=True", "algorithm.adv_estimator=gae")
    assert not said("critic.enable=True", "algorithm.adv_estimator=json:loads")
