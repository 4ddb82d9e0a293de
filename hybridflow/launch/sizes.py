"""Batch sizes and micro-batches, resolved from the configuration and the layouts."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.config.checks import planned_steps
from hybridflow.config.root import PPOConfig
from hybridflow.launch.plan import BatchPlan, MicroPlan, UpdatePlan
from hybridflow.topology.parallel import ParallelDims


def batch_plan(config: PPOConfig, layouts: Mapping[str, ParallelDims]) -> BatchPlan:
    """Every batch size with one unit; ``layouts``: of the training roles, by role."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    return BatchPlan(
        prompts=data.train_batch_size,
        samples_per_prompt=rollout.n,
        prompts_per_round=data.gen_batch_size or data.train_batch_size,
        validation_prompts=data.val_batch_size,
        validation_samples_per_prompt=rollout.val_kwargs.n,
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        model_length=config.model_length,
        updates=_updates(config),
        micro=_micro_plans(config, layouts),
        epochs=config.trainer.total_epochs,
        total_steps=0 if config.trainer.val_only else planned_steps(config),
    )


def _updates(config: PPOConfig) -> tuple[UpdatePlan, ...]:
    actor = config.actor_rollout_ref.actor
    roles = [("actor", actor.ppo_mini_batch_size, actor.ppo_epochs)]
    if config.needs_critic:
        roles.append(("critic", config.critic_mini_batch_size, config.critic_epochs))
    if config.needs_cost_critic:
        roles.append(("cost_critic", config.critic_mini_batch_size, config.critic_epochs))
    return tuple(
        UpdatePlan(
            role=role,
            mini_batch_prompts=prompts,
            mini_batch_sequences=prompts * config.actor_rollout_ref.rollout.n,
            mini_batches=config.data.train_batch_size // prompts,
            epochs=epochs,
        )
        for role, prompts, epochs in roles
    )


def _micro_plans(config: PPOConfig, layouts: Mapping[str, ParallelDims]) -> tuple[MicroPlan, ...]:
    policy, critic, model = config.actor_rollout_ref, config.critic, config.reward.reward_model
    actor, rollout, ref = policy.actor, policy.rollout, policy.ref
    samples = rollout.n
    batch = config.data.train_batch_size * samples
    mini, critic_mini = actor.ppo_mini_batch_size * samples, config.critic_mini_batch_size * samples
    old = rollout.log_prob_max_token_len_per_gpu, rollout.log_prob_micro_batch_size_per_gpu
    update = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    learn = critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu
    value = (
        critic.ppo_max_token_len_per_gpu,
        critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu,
    )
    prior = ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu
    score = model.max_token_len_per_gpu, model.micro_batch_size_per_gpu
    calls = [
        ("actor", "compute_log_prob", rollout.log_prob_use_dynamic_bsz, old, batch, config.recomputes_old_log_probs),
        ("actor", "update_actor", actor.use_dynamic_bsz, update, mini, True),
        ("reference", "compute_ref_log_prob", ref.log_prob_use_dynamic_bsz, prior, batch, config.needs_ref_log_probs),
        ("reference", "full_kl", actor.use_dynamic_bsz, update, mini, config.needs_exact_kl),
        ("critic", "compute_values", critic.use_dynamic_bsz, value, batch, config.needs_critic),
        ("critic", "update_critic", critic.use_dynamic_bsz, learn, critic_mini, config.needs_critic),
        ("cost_critic", "compute_values", critic.use_dynamic_bsz, value, batch, config.needs_cost_critic),
        ("cost_critic", "update_critic", critic.use_dynamic_bsz, learn, critic_mini, config.needs_cost_critic),
        ("reward_model", "compute_model_score", None, score, batch, model.enable),
    ]
    return tuple(
        _micro(role, call, dynamic, *limits, rows=rows, dims=layouts[role])
        for role, call, dynamic, limits, rows, plays in calls
        if plays
    )


def _micro(
    role: str, call: str, dynamic: bool | None, tokens: int, rows_at_most: int | None, *, rows: int, dims: ParallelDims
) -> MicroPlan:
    per_coordinate = -(-rows // dims.dp)
    by_tokens = rows_at_most is None if dynamic is None else dynamic
    return MicroPlan(
        role=role,
        call=call,
        max_tokens=tokens * dims.sp if by_tokens else None,
        max_rows=None if by_tokens else min(rows_at_most or per_coordinate, per_coordinate),
        rows_per_coordinate=per_coordinate,
    )
