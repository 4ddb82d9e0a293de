"""The run itself: length, cadence, devices, outputs (``trainer.*``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutsConfig:
    """Deadlines in seconds; each error names the phase and who was waited for."""

    start_s: float = 300.0
    """Creation of workers and loading of models."""
    generate_s: float = 3600.0
    """One generation phase."""
    train_s: float = 3600.0
    """One update or forward phase."""
    reward_s: float = 1800.0
    """One scoring phase."""
    publish_s: float = 600.0
    """One weight transfer."""
    save_s: float = 1800.0
    """One checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """A resource pool of its own for some roles."""

    slots: tuple[int, ...] = (1,)
    """Slots per node."""
    roles: tuple[str, ...] = ()
    """Roles hosted there: critic, reference, reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """Length, cadence, devices, outputs."""

    project_name: str = "hybridflow"
    """Project of the trackers."""
    experiment_name: str = "grpo_arithmetic"
    """Run of the trackers."""
    default_local_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of all outputs."""
    logger: tuple[str, ...] = ("console", "jsonl")
    """Trackers."""
    seed: int = 1
    """The one seed of the run."""
    total_epochs: int = 1
    """Passes over the training prompts."""
    total_training_steps: int | None = None
    """Trainer steps; None: from the epochs."""
    save_freq: int = -1
    """Trainer steps between checkpoints (the last step always saves); -1: none."""
    test_freq: int = -1
    """Trainer steps between validations; -1: none but before and after."""
    val_before_train: bool = True
    """Whether validation runs first."""
    val_only: bool = False
    """Whether the run ends after that."""
    critic_warmup: int = 0
    """Trainer steps in which only the critic learns."""
    balance_batch: bool = True
    """Whether rows are balanced over ranks by their cost."""
    nnodes: int = 1
    """Nodes."""
    n_gpus_per_node: int = 1
    """Slots per node: GPUs, or logical slots on CPU."""
    device: str = "auto"
    """auto, cpu or cuda."""
    controller: str = "ray"
    """ray, or local (the same workers without Ray)."""
    pools: Mapping[str, PoolConfig] = field(default_factory=dict)
    """Further pools; roles not named there share the main one."""
    threads_per_worker: int | None = None
    """Threads of a worker on CPU; None: cores / slots."""
    resume_mode: str = "auto"
    """auto, disable or resume_path."""
    resume_from_path: str | None = None
    """resume_path: a ``global_step_N`` folder."""
    max_actor_ckpt_to_keep: int | None = None
    """Checkpoints kept; None: all."""
    max_critic_ckpt_to_keep: int | None = None
    """The same for the critic; must equal the actor's (one folder holds both)."""
    log_val_generations: int = 0
    """Validation samples handed to the trackers."""
    rollout_data_dir: str | None = None
    """Folder of ``step_N.jsonl`` with every training sample; None: not written."""
    validation_data_dir: str | None = None
    """The same for validation samples."""
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    """Deadlines."""
    dry_run: bool = False
    """Whether to validate, print the plan and end."""
    strict: bool = False
    """dry_run: whether what this machine lacks is fatal too."""
    profile_steps: tuple[int, ...] = ()
    """Steps recorded by the profiler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """Arguments handed to Ray (``ray_kwargs.*``)."""

    ray_init: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``ray.init``: address joins a cluster, num_cpus, runtime_env ..."""
