"""Keys that another choice of the same configuration leaves without a reader; setting one is answered with a note.

``algorithm.lam`` is read by gae alone, ``kl_loss_coef`` only with ``use_kl_loss``. Existing scripts carry many of these
along, so they are told and not refused. Where a user's own estimator or loss may read a key nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hybridflow.config.choices import ADV_ESTIMATORS, POLICY_LOSSES
from hybridflow.config.problems import show
from hybridflow.config.rejection import read_rejections
from hybridflow.config.tree import defaults_tree, is_set, value_at

if TYPE_CHECKING:
    from hybridflow.config.root import PPOConfig

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
CORRECTION = "algorithm.rollout_correction"
Reader = tuple[str, Callable[["PPOConfig"], bool]]


def _estimators(*names: str) -> Reader:
    def reads(config: PPOConfig) -> bool:
        chosen = config.algorithm.adv_estimator
        return chosen in names or chosen not in ADV_ESTIMATORS

    return f"algorithm.adv_estimator={'|'.join(names)}", reads


def _losses(*names: str) -> Reader:
    def reads(config: PPOConfig) -> bool:
        correction, chosen = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
        if correction.bypass_mode and correction.loss_type == "reinforce":
            return "reinforce" in names
        return chosen in names or chosen not in POLICY_LOSSES

    return f"{LOSS}.loss_mode={'|'.join(names)}", reads


def _switch(key: str, given: object = True) -> Reader:
    return f"{key}={show(given)}", lambda config: value_at(config, key) == given


def _reads_weight_threshold(config: PPOConfig) -> bool:
    chosen = config.algorithm.rollout_correction
    bounds = read_rejections(chosen.rollout_rs, chosen.rollout_rs_threshold, chosen.rollout_is_threshold)
    by_default = chosen.rollout_rs_threshold is None and any(bound.statistic == "k1" for bound in bounds)
    return chosen.rollout_is is not None or by_default


def _reads_aggregation(config: PPOConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    whole_rows = actor.policy_loss.loss_mode in ("gspo", "geo_mean")
    return not whole_rows or actor.loss_agg_mode == "seq-mean-token-mean" or _other_terms(config)


def _other_terms(config: PPOConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.use_kl_loss or actor.entropy_coeff != 0


_CLIPPED = _losses("vanilla", "gspo", "cispo", "clip_cov", "geo_mean")
READERS: dict[str, Reader] = {
    "algorithm.gamma": _estimators(
        "gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"
    ),
    "algorithm.lam": _estimators("gae"),
    "algorithm.norm_adv_by_std_in_grpo": _estimators("grpo", "grpo_passk", "gdpo"),
    "algorithm.passk": _estimators("grpo_passk"),
    "algorithm.gdpo_reward_weights": _estimators("gdpo"),
    "algorithm.kl_penalty": _switch("algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.type": _switch("algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.kl_coef": _switch("algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.target_kl": _switch("algorithm.kl_ctrl.type", "adaptive"),
    "algorithm.kl_ctrl.horizon": _switch("algorithm.kl_ctrl.type", "adaptive"),
    f"{CORRECTION}.rollout_is_threshold": (f"{CORRECTION}.rollout_is=token|sequence", _reads_weight_threshold),
    "algorithm.filter_groups.metric": _switch("algorithm.filter_groups.enable"),
    "algorithm.filter_groups.max_num_gen_batches": _switch("algorithm.filter_groups.enable"),
    "algorithm.filter_groups.on_exhausted": _switch("algorithm.filter_groups.enable"),
    "algorithm.reward_shaping.normalize_momentum": _switch("algorithm.reward_shaping.normalize"),
    "algorithm.safe_rlhf.cost_key": _switch("algorithm.safe_rlhf.enable"),
    "algorithm.safe_rlhf.cost_limit": _switch("algorithm.safe_rlhf.enable"),
    "algorithm.safe_rlhf.multiplier_init": _switch("algorithm.safe_rlhf.enable"),
    "algorithm.safe_rlhf.multiplier_lr": _switch("algorithm.safe_rlhf.enable"),
    "algorithm.ptx_batch_size": ("algorithm.ptx_coef above 0", lambda config: config.algorithm.ptx_coef > 0),
    "algorithm.ptx_length": ("algorithm.ptx_coef above 0", lambda config: config.algorithm.ptx_coef > 0),
    "reward.overlong.len": _switch("reward.overlong.enable"),
    "reward.overlong.penalty_factor": _switch("reward.overlong.enable"),
    "reward.overlong.log": _switch("reward.overlong.enable"),
    f"{ACTOR}.clip_ratio": _CLIPPED,
    f"{ACTOR}.clip_ratio_low": _CLIPPED,
    f"{ACTOR}.clip_ratio_high": _CLIPPED,
    f"{ACTOR}.clip_ratio_c": _losses("vanilla"),
    f"{LOSS}.clip_cov_ratio": _losses("clip_cov"),
    f"{LOSS}.clip_cov_lb": _losses("clip_cov"),
    f"{LOSS}.clip_cov_ub": _losses("clip_cov"),
    f"{LOSS}.kl_cov_ratio": _losses("kl_cov"),
    f"{LOSS}.ppo_kl_coef": _losses("kl_cov"),
    f"{LOSS}.tau_pos": _losses("sapo"),
    f"{LOSS}.tau_neg": _losses("sapo"),
    f"{LOSS}.dro_beta": _losses("dro"),
    f"{LOSS}.dppo_threshold": _losses("dppo_tv", "dppo_kl"),
    f"{ACTOR}.loss_agg_mode": ("a loss of tokens, a KL or an entropy term", _reads_aggregation),
    f"{ACTOR}.loss_scale_factor": _switch(f"{ACTOR}.loss_agg_mode", "seq-mean-token-sum-norm"),
    f"{ACTOR}.kl_loss_coef": _switch(f"{ACTOR}.use_kl_loss"),
    f"{ACTOR}.kl_loss_type": _switch(f"{ACTOR}.use_kl_loss"),
}
"""By key: what reads it, in words, and whether this configuration has that."""


def set_in_vain(config: PPOConfig) -> Iterator[str]:
    """``keys with values: read with X only``, of keys that differ from their defaults and that nothing will read."""
    defaults = defaults_tree(type(config))
    idle: dict[str, list[str]] = {}
    for key, (reader, reads) in READERS.items():
        value = value_at(config, key)
        if is_set(value, value_at(defaults, key)) and not reads(config):
            idle.setdefault(reader, []).append(f"{key}={show(value)}")
    for reader, settings in idle.items():
        yield f"{', '.join(settings)}: read with {reader} only"
