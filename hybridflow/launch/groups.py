"""Worker groups of a run, on Ray or on this machine alone, and their orderly end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.config.trainer import TimeoutsConfig
from hybridflow.dispatch.group import WorkerGroup, WorkerSpec
from hybridflow.engines.rollout.registry import ROLLOUT_ENGINES
from hybridflow.engines.train.registry import TRAIN_ENGINES
from hybridflow.launch.plan import PoolPlan, RunPlan
from hybridflow.single_controller.lanes import GroupSettings
from hybridflow.single_controller.local_group import PRELOAD, LocalGroup
from hybridflow.single_controller.replicas import Replica, ReplicaGroup
from hybridflow.topology.resources import MAIN_POOL
from hybridflow.utils.optional import load


def open_groups(
    config: PPOConfig, plan: RunPlan, specs: Mapping[str, Sequence[WorkerSpec]], stack: ExitStack
) -> dict[str, WorkerGroup]:
    """One started group per pool; ``stack`` ends them, last first. Returns before workers stand."""
    groups: dict[str, WorkerGroup] = {}
    for name, pool_specs in specs.items():
        pool = plan.pool(name)
        start = _starter(config, pool, pool_specs, stack)
        if config.rollout_shares_devices or "rollout" not in pool.pool.roles:
            group: WorkerGroup = start(0)
        else:
            group = _replicas(config, pool, start, keep=lambda rows: groups[MAIN_POOL].keep(rows.fetched()))
        stack.callback(group.shutdown)
        groups[name] = group
    return groups


def _replicas(
    config: PPOConfig, plan: PoolPlan, start: Callable[[int], Replica], *, keep: Callable[[Batch], Batch]
) -> ReplicaGroup:
    """A generator in a pool of its own. Where other roles live there too, their state would die with a replica."""
    alone = plan.pool.roles == ("rollout",)
    restarts = config.trainer.max_replica_restarts if alone else 0
    return ReplicaGroup(
        start, plan.replicas, restarts=restarts, hold=keep if restarts else _left_there, name=plan.pool.name
    )


def _left_there(rows: Batch) -> Batch:
    """Rows whose process will not be outlived: its death is the run's."""
    return rows


def _starter(
    config: PPOConfig, plan: PoolPlan, specs: Sequence[WorkerSpec], stack: ExitStack
) -> Callable[[int], Replica]:
    """Starts the group of a pool, or, of several equal ones, that of this number; any number of times."""
    world = plan.pool.world // plan.replicas

    def settings(number: int) -> GroupSettings:
        name = plan.pool.name
        return _settings(config, plan, name if plan.replicas == 1 else f"{name}.{number}")

    if config.trainer.controller == "local":
        preload = (*PRELOAD, *_imports(config, specs))
        apart = not config.rollout_shares_devices
        return lambda number: LocalGroup(world, specs, settings(number), preload=preload, apart=apart)
    pool = load("hybridflow.single_controller.resource_pool:ResourcePool")(plan.pool.slots, name=plan.pool.name)
    stack.callback(pool.release)  # a cluster that we joined lives on
    slots = pool.parts(plan.replicas)
    return lambda number: load("hybridflow.single_controller.ray_group:RayGroup")(
        slots[number], specs, settings(number)
    )


def _settings(config: PPOConfig, plan: PoolPlan, name: str) -> GroupSettings:
    timeouts = config.trainer.timeouts
    generates_alone = plan.pool.roles == ("rollout",) and not config.rollout_shares_devices
    return GroupSettings(
        name=name,
        environment=plan.environment,
        unset=plan.unset,
        device=plan.device,
        backend="nccl" if plan.device == "cuda" else "gloo",
        start_timeout_s=timeouts.start_s,
        collective_timeout_s=float(config.actor_rollout_ref.nccl_timeout),
        deadlines=method_deadlines(timeouts),
        default_deadline_s=timeouts.train_s,
        silence_s=timeouts.silence_s if generates_alone else None,
        stack_folder=Path(config.trainer.default_local_dir) / "stacks",
    )


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
