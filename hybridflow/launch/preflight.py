"""All that is decided and judged before the first process starts. Imports no torch, starts nothing.

``plan_run`` resolves a configuration into a ``RunPlan``; ``check_machine`` compares the plan with this machine. The
first decides the exit code of a dry run, the second is fatal for a real run.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.checks import VALUE_ESTIMATORS
from hybridflow.config.choices import ADV_ESTIMATORS
from hybridflow.config.data import BUILTIN_TASK
from hybridflow.config.in_vain import set_in_vain
from hybridflow.config.problems import raise_if_any
from hybridflow.config.root import PPOConfig
from hybridflow.config.unread import set_without_effect
from hybridflow.engines.rollout import environment as rollout_environment
from hybridflow.engines.train import environment as train_environment
from hybridflow.launch.dataflow import dataflow
from hybridflow.launch.findings import check_machine
from hybridflow.launch.foreign_names import foreign_problems
from hybridflow.launch.hf_model import ModelFacts, read_model
from hybridflow.launch.machine import Machine, inspect_machine
from hybridflow.launch.memory import estimate
from hybridflow.launch.plan import Device, Finding, PoolPlan, RolePlan, RunPlan
from hybridflow.launch.sizes import batch_plan
from hybridflow.topology.resources import MAIN_POOL, Pool, generation_layout, training_layout
from hybridflow.utils.errors import MachineError

LARGE_LR = 1e-4
"""Learning rates from here on ruin a pretrained model whose weights are all trained; the default job's own is one."""
HOST_POOL = "host"
"""Processes without a device, for reward functions."""
_SLACK_CORES = 0.3
"""Work of others that does not count when cores are called idle: a desktop's, this run's driver."""

__all__ = ["Finding", "check_machine", "plan_run"]


def plan_run(config: PPOConfig, machine: Machine | None = None) -> RunPlan:
    """The plan of a run on ``machine`` (None: this one).

    Raises:
        InvalidConfigError: a name that Ray or fsspec does not know; only the installed packages tell.
    """
    raise_if_any(foreign_problems(config))
    machine = machine or inspect_machine()
    device = resolve_device(config, machine)
    roles = place(config, device)
    batch = batch_plan(config, {role.role: role.dims for role in roles})
    model = _known_model(config)
    return RunPlan(
        device=device,
        batch=batch,
        pools=_pools(config, roles, machine, device),
        roles=roles,
        dataflow=dataflow(config),
        model=model,
        memory=estimate(config, roles, batch, model, machine, device) if model is not None else (),
        notes=_notes(config, device),
    )


def resolve_device(config: PPOConfig, machine: Machine) -> Device:
    """cpu or cuda; ``auto`` takes cuda where this machine can use it."""
    if config.trainer.device == "auto":
        return "cuda" if machine.cuda_usable else "cpu"
    return "cuda" if config.trainer.device == "cuda" else "cpu"


def place(config: PPOConfig, device: Device) -> tuple[RolePlan, ...]:
    """Pool and layout of every role that plays.

    Reward functions get processes of their own beside GPUs, which must not wait for them; on a CPU they share the
    main pool's, since one more process costs more than it frees.
    """
    policy = config.actor_rollout_ref
    actor, ref, critic, model = policy.actor, policy.ref, config.critic, config.reward.reward_model
    tp = policy.rollout.tensor_model_parallel_size
    roles = [
        RolePlan(
            role="actor",
            pool=MAIN_POOL,
            mesh="train",
            dims=training_layout(
                config.world_of("actor"),
                pp=actor.pipeline_parallel_size,
                sp=actor.ulysses_sequence_parallel_size,
                tp=actor.tensor_parallel_size,
                shard=actor.fsdp_config.fsdp_size,
                zero_stage=actor.zero_stage,
            ),
        ),
        RolePlan(
            role="rollout",
            pool=config.pool_of("rollout"),
            mesh="rollout",
            dims=generation_layout(config.world_of("rollout"), tp=tp),
        ),
    ]
    for role, home, section, sharding, plays in (
        ("reference", "reference", ref, ref.fsdp_config, config.needs_reference),
        ("critic", "critic", critic, critic.fsdp, config.needs_critic),
        ("cost_critic", "critic", critic, critic.fsdp, config.needs_cost_critic),
        ("reward_model", "reward", model, model.fsdp_config, model.enable),
    ):
        if plays:
            dims = training_layout(
                config.world_of(home),
                pp=section.pipeline_parallel_size,
                sp=section.ulysses_sequence_parallel_size,
                tp=section.tensor_parallel_size,
                shard=sharding.fsdp_size,
                zero_stage=section.zero_stage,
            )
            roles.append(RolePlan(role=role, pool=config.pool_of(home), mesh="train", dims=dims))
    if device == "cpu" or config.pool_of("reward") != MAIN_POOL:
        pool, world = config.pool_of("reward"), config.world_of("reward")
    else:
        pool, world = HOST_POOL, config.reward.num_workers
    roles.append(RolePlan(role="reward", pool=pool, mesh="train", dims=training_layout(world)))
    return tuple(roles)


def _pools(config: PPOConfig, roles: tuple[RolePlan, ...], machine: Machine, device: Device) -> tuple[PoolPlan, ...]:
    trainer = config.trainer
    slots = {MAIN_POOL: (trainer.n_gpus_per_node,) * trainer.nnodes}
    slots |= {name: pool.slots for name, pool in trainer.pools.items()}
    if any(role.pool == HOST_POOL for role in roles):
        slots[HOST_POOL] = (config.reward.num_workers,)
    on_devices = sum(sum(counts) for name, counts in slots.items() if name != HOST_POOL)
    share = trainer.threads_per_worker or max(1, machine.cores // on_devices)
    awake = trainer.nnodes == 1 and share * on_devices + machine.busy_cores <= machine.cores + _SLACK_CORES
    name = config.actor_rollout_ref.rollout.name
    generator = next(role for role in roles if role.role == "rollout")
    found = []
    for pool, counts in slots.items():
        members = tuple(role.role for role in roles if role.pool == pool)
        kind: Device = "cpu" if pool == HOST_POOL else device
        threads = 1 if pool == HOST_POOL else share
        hosts_rollout = "rollout" in members
        variables = train_environment.variables(kind, threads, own_cores=awake)
        variables |= rollout_environment.variables(name, kind) if hosts_rollout else {}
        found.append(
            PoolPlan(
                pool=Pool(name=pool, slots=counts, roles=members),
                device=kind,
                threads=threads,
                environment=variables,
                unset=rollout_environment.unset(name, kind) if hosts_rollout else (),
                replicas=generator.dims.dp if members == ("rollout",) else 1,
            )
        )
    return tuple(found)


def _known_model(config: PPOConfig) -> ModelFacts | None:
    model = config.actor_rollout_ref.model
    try:
        return read_model(model.path, model.override_config)
    except MachineError:  # reported by check_machine, which reads it again
        return None


def _notes(config: PPOConfig, device: Device) -> tuple[str, ...]:
    rollout, estimator = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    found = []
    compute = {
        "actor_rollout_ref.rollout.dtype": rollout.dtype,
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": (
            config.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype
        ),
    }
    slow = [key for key, dtype in compute.items() if dtype in ("fp32", "float32")]
    if slow and device == "cuda":
        asked = " ".join(f"{key}=bf16" for key in slow)
        found.append(f"computes in fp32 on GPUs (verl's default is bf16): for several times the speed set {asked}")
    lr, model = config.actor_rollout_ref.actor.optim.lr, config.actor_rollout_ref.model
    if lr >= LARGE_LR and model.path != BUILTIN_TASK and model.lora_rank == 0:
        found.append(
            f"actor_rollout_ref.actor.optim.lr={lr:g} suits the default job's tiny model: 1e-6 is usual for billions "
            "of parameters, 1e-5 for a hundred million"
        )
    if estimator in ("gae", "remax", "reinforce_plus_plus") and rollout.n > 1:
        found.append(
            f"actor_rollout_ref.rollout.n={rollout.n} (verl's default is 1): {estimator} needs no more than one sample "
            "per prompt"
        )
    if BUILTIN_TASK in config.data.val_files and BUILTIN_TASK not in config.data.train_files:
        found.append(
            f"data.val_files={BUILTIN_TASK} is the default job's: validation asks sums, nothing of your data; set "
            "data.val_files=FILE"
        )
    if rollout.mode == "async":
        found.append(
            "actor_rollout_ref.rollout.mode=async is the same loop as sync: requests join and leave the engine's batch "
            "one by one in both; there is no server, no agent loop, and a step ends with its last response"
        )
    found += _unloadable(config)
    if not config.rollout_shares_devices:
        found.append(
            f"the generator has devices of its own (pool {config.pool_of('rollout')}): every publish sends each of its "
            "ranks all that it stores, and its devices idle while the actor trains"
        )
    if config.critic.enable and estimator in ADV_ESTIMATORS and estimator not in VALUE_ESTIMATORS:
        found.append(
            f"critic.enable=True: algorithm.adv_estimator={estimator} reads no values, so the critic learns and "
            "changes nothing"
        )
    found += set_in_vain(config)
    found += [f"{setting} has no effect yet" for setting in set_without_effect(config)]
    return tuple(found)


def _unloadable(config: PPOConfig) -> Iterator[str]:
    """Notes on checkpoints of this run that the same configuration could not go on from."""
    if config.trainer.save_freq <= 0:
        return
    saved = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor.checkpoint}
    if config.needs_critic:
        saved["critic"] = config.critic.checkpoint
    for role, contents in saved.items():
        absent = [content for content in contents.load_contents if content not in contents.save_contents]
        if absent:
            left = ",".join(content for content in contents.load_contents if content not in absent)
            yield (
                f"{role}.checkpoint: save_contents lacks {', '.join(absent)}, which load_contents asks for: resuming "
                f"from these checkpoints will be refused, unless load_contents=[{left}] says that it starts anew"
            )
