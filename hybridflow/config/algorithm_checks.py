"""Faults of KL, rollout correction and reward shaping: choices that need others, and choices that would do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridflow.config.problems import Problem, show
from hybridflow.config.rejection import UnreadableRejectionError, read_rejections

if TYPE_CHECKING:
    from hybridflow.config.root import PPOConfig

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
CORRECTION = "algorithm.rollout_correction"
REPLACED_BY_REINFORCE = frozenset({"vanilla", "reinforce", "gpg"})
"""Policy losses that loss_type=reinforce may stand beside: the default, and itself."""


def exact_kl(config: PPOConfig) -> Iterator[Problem]:
    """KL ``full``: actor and reference must be evaluated side by side (docs/design/0020)."""
    if not config.needs_exact_kl:
        return
    actor, ref, bypass = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, f"{CORRECTION}.bypass_mode"
    if config.exact_kl_in_reward:
        key, kind, switch = "algorithm.kl_penalty", config.algorithm.kl_penalty, "algorithm.use_kl_in_reward"
    else:
        key, kind, switch = f"{ACTOR}.kl_loss_type", actor.kl_loss_type, f"{ACTOR}.use_kl_loss"
    pool = config.pool_of("reference")
    if pool != "main":
        text = f"compares whole distributions token by token, and the reference lives apart, in trainer.pools.{pool}"
        fix = "Take the reference out of the pool, or use low_var_kl."
        yield Problem(key=key, given=kind, text=text, fix=fix, reads=(switch, f"trainer.pools.{pool}.roles"))
    for size_key, ours, theirs in (
        ("pipeline_parallel_size", actor.pipeline_parallel_size, ref.pipeline_parallel_size),
        ("tensor_parallel_size", actor.tensor_parallel_size, ref.tensor_parallel_size),
        (
            "ulysses_sequence_parallel_size",
            actor.ulysses_sequence_parallel_size,
            ref.ulysses_sequence_parallel_size,
        ),
    ):
        keys = (switch, f"{ACTOR}.{size_key}", f"{REF}.{size_key}")
        if ours != theirs:
            text = f"reads both models on the same ranks: {ACTOR}.{size_key}={ours} must equal the reference's"
            yield Problem(
                key=f"{REF}.{size_key}", given=show(theirs), text=text, fix=f"Use {ours}.", reads=(key, *keys)
            )
    if config.exact_kl_in_reward and config.algorithm.rollout_correction.bypass_mode:
        text = "is computed with the old log-probs, which bypass_mode does without"
        yield Problem(key=key, given=kind, text=text, fix="Use low_var_kl.", reads=(switch, bypass))


def correction(config: PPOConfig) -> Iterator[Problem]:
    """Rollout correction: contradictions, and settings that no part of the run would read."""
    chosen = config.algorithm.rollout_correction
    bypass = f"{CORRECTION}.bypass_mode"
    if chosen.bypass_mode and chosen.rollout_is_batch_normalize:
        text = "divides by a batch mean, and in bypass_mode the weights are known only inside the loss"
        key = f"{CORRECTION}.rollout_is_batch_normalize"
        yield Problem(key=key, given="True", text=text, fix="Keep one of the two.", reads=(bypass,))
    if chosen.bypass_mode and chosen.loss_type == "ppo_clip" and chosen.rollout_is is not None:
        text = (
            "has no effect: in bypass_mode with loss_type=ppo_clip the clipped ratio already is current / sampling "
            "policy"
        )
        fix = f"Remove it, or use {CORRECTION}.loss_type=reinforce."
        reads = (bypass, f"{CORRECTION}.loss_type")
        yield Problem(key=f"{CORRECTION}.rollout_is", given=chosen.rollout_is, text=text, fix=fix, reads=reads)
    if chosen.bypass_mode and chosen.guard_max_log_ratio is not None:
        text = "compares the sampler's log-probs with recomputed ones, and bypass_mode does not recompute them"
        key, given = f"{CORRECTION}.guard_max_log_ratio", show(chosen.guard_max_log_ratio)
        yield Problem(key=key, given=given, text=text, fix="Keep one of the two.", reads=(bypass,))
    normalize, threshold, guard = chosen.rollout_is_batch_normalize, chosen.rollout_rs_threshold, chosen.guard_action
    for name, given, set_, other, there in (
        ("loss_type", chosen.loss_type, chosen.loss_type != "ppo_clip", "bypass_mode=True", chosen.bypass_mode),
        ("rollout_is_batch_normalize", normalize, normalize, "rollout_is", chosen.rollout_is is not None),
        ("rollout_rs_threshold", threshold, threshold is not None, "rollout_rs", chosen.rollout_rs is not None),
        ("guard_action", guard, guard != "warn", "guard_max_log_ratio", chosen.guard_max_log_ratio is not None),
    ):
        if set_ and not there:
            text, fix = f"has no effect without {CORRECTION}.{other}", "Set that, or remove this key."
            reads = (f"{CORRECTION}.{other.partition('=')[0]}",)
            yield Problem(key=f"{CORRECTION}.{name}", given=show(given), text=text, fix=fix, reads=reads)
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if chosen.bypass_mode and chosen.loss_type == "reinforce" and loss_mode not in REPLACED_BY_REINFORCE:
        text = f"is not used: {CORRECTION}.loss_type=reinforce is the policy loss of bypass_mode"
        key, reads = f"{ACTOR}.policy_loss.loss_mode", (bypass, f"{CORRECTION}.loss_type")
        yield Problem(key=key, given=loss_mode, text=text, fix="Keep one of the two.", reads=reads)
    try:
        read_rejections(chosen.rollout_rs, chosen.rollout_rs_threshold, chosen.rollout_is_threshold)
    except UnreadableRejectionError as error:
        key, given = f"{CORRECTION}.{error.field}", show(getattr(chosen, error.field))
        fix, reads = "Give one for all, or one each.", (f"{CORRECTION}.rollout_rs",)
        yield Problem(key=key, given=given, text=error.text, fix=fix, reads=reads)


def _components(config: PPOConfig) -> Iterator[Problem]:
    """Weights of components that nobody gives, and givers without a weight."""
    reward, weights, key = config.reward, config.reward.component_weights, "reward.component_weights"
    model, enable = "reward_model", "reward.reward_model.enable"
    if weights and reward.reward_model.enable != (model in weights):
        text = f"names {model}, and there is none" if model in weights else f"gives {model} no weight, and it scores"
        fix = f"Set {enable}=True, or remove it." if model in weights else f"Set {key}.{model}=1.0."
        yield Problem(key=key, given=show(dict(weights)), text=text, fix=fix, reads=(enable,))
    elif reward.reward_model.enable and len(weights) > 1 and reward.custom_reward_function.path is None:
        text, fix = f"names more than {model}, and no function gives it", "Set reward.custom_reward_function.path."
        yield Problem(key=key, given=show(dict(weights)), text=text, fix=fix, reads=(enable,))


def shaping(config: PPOConfig) -> Iterator[Problem]:
    """Penalties, shaping and a multiplier that would do nothing, or something else than they say."""
    algorithm, overlong, longest = config.algorithm, config.reward.overlong, config.response_length
    if overlong.enable and not 0 < overlong.len <= longest:
        text = f"is the buffer before the limit of {longest} tokens in which the penalty grows: 1 to {longest} tokens"
        fix, reads = f"Use {max(1, longest // 4)}.", ("reward.overlong.enable", "data.max_response_length")
        yield Problem(key="reward.overlong.len", given=show(overlong.len), text=text, fix=fix, reads=reads)
    safe = algorithm.safe_rlhf
    if safe.enable and safe.multiplier_init == 0 and safe.multiplier_lr > 0:
        text = "never grows: a step multiplies it"
        fix = "Use a small number such as 0.01, or algorithm.safe_rlhf.multiplier_lr=0 to watch costs only."
        reads = ("algorithm.safe_rlhf.enable", "algorithm.safe_rlhf.multiplier_lr")
        yield Problem(key="algorithm.safe_rlhf.multiplier_init", given="0", text=text, fix=fix, reads=reads)
    yield from _components(config)
    if config.reward.step_rewards and algorithm.adv_estimator in ("remax", "gdpo"):
        why = "its greedy baseline is a score alone" if algorithm.adv_estimator == "remax" else "it reads components"
        text, fix = f"does not reach algorithm.adv_estimator={algorithm.adv_estimator}: {why}", "Use gae, grpo or rloo."
        reads = ("algorithm.adv_estimator",)
        yield Problem(key="reward.step_rewards", given="True", text=text, fix=fix, reads=reads)
    if algorithm.adv_estimator != "gdpo":
        return
    form = algorithm.reward_shaping
    for key, set_ in (
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward),
        ("algorithm.reward_shaping.normalize", form.normalize),
        ("algorithm.reward_shaping.clip", form.clip),
        ("algorithm.reward_shaping.length_penalty", form.length_penalty),
        ("reward.overlong.enable", overlong.enable),
    ):
        if set_:
            text = "has no effect: algorithm.adv_estimator=gdpo reads components of the reward, not the shaped score"
            use_kl = f"Use {ACTOR}.use_kl_loss=True." if key.endswith("use_kl_in_reward") else ""
            fix = use_kl or "Return it as a component, or use another estimator."
            yield Problem(key=key, given=show(set_), text=text, fix=fix, reads=("algorithm.adv_estimator",))
