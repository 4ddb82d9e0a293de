"""Faults of the training engine's settings: what it lacks today, and settings that no part of it would read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridflow.config.algorithm_checks import ACTOR, REF
from hybridflow.config.choices import OPTIMIZERS
from hybridflow.config.model import OptimConfig
from hybridflow.config.problems import Problem, show

if TYPE_CHECKING:
    from hybridflow.config.root import PPOConfig

RM = "reward.reward_model"


def engines(config: PPOConfig) -> Iterator[Problem]:
    """What engines (engines/train/parallelize.py: refuse_unsupported) and workers lack today, said early."""
    policy = config.actor_rollout_ref
    scorer = config.reward.reward_model
    shardings = [(f"{ACTOR}.fsdp_config", policy.actor.fsdp_config)]
    shardings += [(f"{REF}.fsdp_config", policy.ref.fsdp_config)] if config.needs_reference else []
    shardings += [("critic.fsdp", config.critic.fsdp)] if config.needs_critic else []
    shardings += [(f"{RM}.fsdp_config", scorer.fsdp_config)] if scorer.enable else []
    for at, sharding in shardings:
        dtype = sharding.mixed_precision.param_dtype
        if dtype in ("fp16", "float16"):
            key, text = f"{at}.mixed_precision.param_dtype", "needs loss scaling, which is not supported"
            yield Problem(key=key, given=dtype, text=text, fix="Use bf16.")
    models = [("actor_rollout_ref.model", policy.model, ACTOR, policy.actor.tensor_parallel_size)]
    if config.needs_critic:
        models.append(("critic.model", config.critic.model, "critic", config.critic.tensor_parallel_size))
    if scorer.enable:
        models.append((f"{RM}.model", scorer.model, RM, scorer.tensor_parallel_size))
    compiled = config.actor_rollout_ref.actor.use_torch_compile
    for at, model, role, tp in models:
        key, selective = f"{at}.gradient_checkpointing_mode", model.gradient_checkpointing_mode == "selective"
        if selective and not model.enable_gradient_checkpointing:
            text, fix = f"has no effect without {at}.enable_gradient_checkpointing", "Set that to True."
            reads = (f"{at}.enable_gradient_checkpointing",)
            yield Problem(key=key, given="selective", text=text, fix=fix, reads=reads)
        elif selective and role == ACTOR and compiled:
            text, reads = (
                "decides operation by operation, and compiled layers show none",
                (f"{ACTOR}.use_torch_compile",),
            )
            yield Problem(key=key, given="selective", text=text, fix="Use full.", reads=reads)
        if model.use_liger and tp > 1:
            text, reads = f"liger's kernels take no weights cut over {tp} ranks", (f"{role}.tensor_parallel_size",)
            yield Problem(key=f"{at}.use_liger", given="True", text=text, fix="Remove the key.", reads=reads)


def optimizers(config: PPOConfig) -> Iterator[Problem]:
    """Arguments of Adam that would not reach an optimizer of the user's choice."""
    chosen = [(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim)]
    chosen += [("critic.optim", config.critic.optim)] if config.needs_critic else []
    for at, optim in chosen:
        if optim.optimizer in OPTIMIZERS:
            continue
        for name, given in (("betas", optim.betas), ("eps", optim.eps)):
            if given != getattr(OptimConfig(), name):
                text = f"is AdamW's, and {at}.optimizer={optim.optimizer} would not see it"
                fix = f"Set {at}.override_optimizer_config.{name}, if it has one."
                yield Problem(key=f"{at}.{name}", given=show(given), text=text, fix=fix, reads=(f"{at}.optimizer",))
