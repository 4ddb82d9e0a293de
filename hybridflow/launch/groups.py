"""Worker groups of a run, on Ray or on this machine alone, and their orderly end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from hybridflow.config.root import PPOConfig
from hybridflow.config.trainer import TimeoutsConfig
from hybridflow.dispatch.group import WorkerGroup, WorkerSpec
from hybridflow.engines.rollout.registry import ROLLOUT_ENGINES
from hybridflow.engines.train.registry import TRAIN_ENGINES
from hybridflow.launch.plan import PoolPlan, RunPlan
from hybridflow.single_controller.lanes import GroupSettings
from hybridflow.single_controller.local_group import PRELOAD, LocalGroup
from hybridflow.utils.optional import load


def open_groups(
    config: PPOConfig, plan: RunPlan, specs: Mapping[str, Sequence[WorkerSpec]], stack: ExitStack
) -> dict[str, WorkerGroup]:
    """One started group per pool; ``stack`` ends them, last first. Returns before workers stand."""
    groups: dict[str, WorkerGroup] = {}
    for name, pool_specs in specs.items():
        pool = plan.pool(name)
        group = _open(config, pool, pool_specs, stack)
        stack.callback(group.shutdown)
        groups[name] = group
    return groups


def _open(config: PPOConfig, plan: PoolPlan, specs: Sequence[WorkerSpec], stack: ExitStack) -> WorkerGroup:
    timeouts = config.trainer.timeouts
    settings = GroupSettings(
        name=plan.pool.name,
        environment=plan.environment,
        unset=plan.unset,
        device=plan.device,
        backend="nccl" if plan.device == "cuda" else "gloo",
        start_timeout_s=timeouts.start_s,
        collective_timeout_s=float(config.actor_rollout_ref.nccl_timeout),
        deadlines=method_deadlines(timeouts),
        default_deadline_s=timeouts.train_s,
        stack_folder=Path(config.trainer.default_local_dir) / "stacks",
    )
    if config.trainer.controller == "local":
        return LocalGroup(plan.pool.world, specs, settings, preload=(*PRELOAD, *_imports(config, specs)))
    pool = load("hybridflow.single_controller.resource_pool:ResourcePool")(plan.pool.slots, name=plan.pool.name)
    stack.callback(pool.release)  # a cluster that we joined lives on
    return load("hybridflow.single_controller.ray_group:RayGroup")(pool, specs, settings)


def _imports(config: PPOConfig, specs: Sequence[WorkerSpec]) -> list[str]:
    """Modules that every rank will import: the fork server imports them once, also for ranks of a restart.

    Not where vLLM generates: it reads variables of its own, which a rank gets after it was forked.
    """
    policy = config.actor_rollout_ref
    if policy.rollout.name != "hf":
        return []
    targets = [spec.target for spec in specs]
    targets += [TRAIN_ENGINES[policy.actor.strategy], ROLLOUT_ENGINES[policy.rollout.name]]
    return list(dict.fromkeys(target.partition(":")[0] for target in targets))


def method_deadlines(timeouts: TimeoutsConfig) -> dict[str, float]:
    """Seconds by worker method; methods that are not named here have ``timeouts.train_s``."""
    return {
        "generate_sequences": timeouts.generate_s,
        "compute_reward": timeouts.reward_s,
        "publish": timeouts.publish_s,
        "join": timeouts.start_s,
        "save_checkpoint": timeouts.save_s,
        "finish_checkpoint": timeouts.save_s,
        "load_checkpoint": timeouts.save_s,
    }
