"""Which workers a run needs, with their arguments, by pool: the one place that knows every worker class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import WorkerSpec
from hybridflow.launch.plan import RunPlan

WORKERS: dict[str, str] = {
    "actor": "hybridflow.workers.actor:ActorWorker",
    "reference": "hybridflow.workers.reference:ReferenceWorker",
    "rollout": "hybridflow.workers.rollout:RolloutWorker",
    "weights": "hybridflow.workers.hybrid:WeightsWorker",
    "critic": "hybridflow.workers.critic:CriticWorker",
    "cost_critic": "hybridflow.workers.critic:CriticWorker",
    "reward_model": "hybridflow.workers.reward_model:RewardModelWorker",
    "reward": "hybridflow.workers.reward:RewardWorker",
}
"""Worker class by role, in the order in which a process builds them: weights joins the actor and rollout before it."""
WEIGHTS_APART = {"actor": "hybridflow.workers.separate:Sender", "rollout": "hybridflow.workers.separate:Receiver"}
"""Class of the role weights beside the actor and beside the generator, where these live in different pools."""
OBSERVER_WORKER = "hybridflow.workers.observer:ObserverWorker"
OBSERVER = "observer"
"""Role of the worker that looks on in every process; built last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where weights and vocabulary come from."""

    policy: str
    """Folder or hub name of the policy."""
    critic: str
    """The same of the value model's body."""
    reward_model: str
    """The same of the reward model; empty: none scores."""
    tokenizer: str
    """The same of the tokenizer."""
    eos_token_ids: tuple[int, ...]
    vocab_limit: int


def worker_specs(
    config: PPOConfig, plan: RunPlan, source: ModelSource, total_steps: int | None
) -> dict[str, list[WorkerSpec]]:
    """The specs of every pool.

    Args:
        total_steps: length of learning-rate schedules in trainer steps; None when no schedule needs it.
    """
    dims = {role.role: role.dims for role in plan.roles}
    apart = plan.pool(plan.role("rollout").pool).replicas
    dims["rollout"] = replace(dims["rollout"], dp_shard=dims["rollout"].dp_shard // apart)  # what one group hosts
    rollout_tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    arguments: dict[str, Mapping[str, Any]] = {
        "actor": {
            "model_path": source.policy,
            "total_steps": total_steps,
            "rollout_tp": rollout_tp if config.rollout_shares_devices else 1,  # shards then need no order
            "vocab_limit": source.vocab_limit,
            "tokenizer_path": source.tokenizer,
        },
        "reference": {"model_path": source.policy, "vocab_limit": source.vocab_limit},
        "rollout": {
            "model_path": source.policy,
            "eos_token_ids": source.eos_token_ids,
            "vocab_limit": source.vocab_limit,
            "replicas": apart,
        },
        "critic": {"model_path": source.critic, "total_steps": total_steps},
        "cost_critic": {"model_path": source.critic, "total_steps": total_steps, "role": "cost_critic"},
        "reward_model": {"model_path": source.reward_model},
    }
    pools = {role.role: role.pool for role in plan.roles}
    if config.rollout_shares_devices:
        pools["weights"] = pools["actor"]
    specs: dict[str, list[WorkerSpec]] = {}
    for role, target in WORKERS.items():
        if role not in pools:
            continue
        kwargs: dict[str, Any] = {"config": config}
        if role in arguments:
            kwargs |= {"dims": dims[role], **arguments[role]}
        if role == "reward":
            kwargs |= {"tokenizer_path": source.tokenizer}
        layouts = {plan.role(role).mesh: dims[role]} if role in dims else {}
        specs.setdefault(pools[role], []).append(WorkerSpec(role=role, target=target, kwargs=kwargs, layouts=layouts))
    if "weights" not in pools:
        for beside, target in WEIGHTS_APART.items():
            specs[pools[beside]].append(WorkerSpec(role="weights", target=target, kwargs={"config": config}))
    for pool in specs.values():
        pool.append(WorkerSpec(role=OBSERVER, target=OBSERVER_WORKER, kwargs={"config": config}))
    return specs
