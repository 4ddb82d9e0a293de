"""The run itself: length, cadence, devices, outputs (``trainer.*``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridflow.config.choices import CONTROLLERS, DEVICES, POOL_ROLES, RESUME_MODES, SAVE_FAILURES, TRACKERS
from hybridflow.config.constraints import (
    CountOrAll,
    Folder,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    check_fields,
)
from hybridflow.config.problems import Problem, show


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutsConfig(Section):
    """Deadlines in seconds; each error names the phase and who was waited for."""

    start_s: PositiveFloat = 300.0
    """Creation of workers and loading of models."""
    data_s: PositiveFloat = 3600.0
    """Reading, filtering and encoding of all prompts before the first step."""
    generate_s: PositiveFloat = 3600.0
    """One generation phase."""
    silence_s: PositiveFloat = 60.0
    """How long a replica of a generator in a pool to itself may give no sign of life: its process does not answer, or
    no engine step ends (ten times its longest step where that is more; before its first step ten times this)."""
    train_s: PositiveFloat = 3600.0
    """One update or forward phase."""
    reward_s: PositiveFloat = 1800.0
    """One scoring phase."""
    publish_s: PositiveFloat = 600.0
    """One weight transfer."""
    save_s: PositiveFloat = 1800.0
    """One checkpoint, written or fetched."""
    track_s: PositiveFloat = 300.0
    """One call of a tracker; one that is later is given up, and the run goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig(Section):
    """A resource pool of its own for some roles."""

    slots: tuple[PositiveInt, ...] = (1,)
    """Slots per node."""
    roles: tuple[Annotated[str, OneOf(POOL_ROLES)], ...] = ()
    """Roles hosted there: rollout (the generator on its own devices), critic, reference, reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig(Section):
    """Length, cadence, devices, outputs."""

    project_name: str = "hybridflow"
    """Project of the trackers."""
    experiment_name: str = "grpo_arithmetic"
    """Run of the trackers."""
    default_local_dir: Annotated[str, Folder("; trainer.checkpoint_copy=URL gets a copy of every checkpoint")] = (
        "outputs/${trainer.project_name}/${trainer.experiment_name}"
    )
    """Folder of all outputs; the two names in it are filled in."""
    logger: tuple[Annotated[str, OneOf(TRACKERS)], ...] = ("console", "jsonl")
    """Trackers."""
    seed: Seed = 1
    """The one seed of the run."""
    total_epochs: PositiveInt = 1
    """Passes over the training prompts."""
    total_training_steps: PositiveInt | None = None
    """Trainer steps; None: from the epochs."""
    save_freq: CountOrAll = -1
    """Trainer steps between checkpoints (the last step always saves); -1: none."""
    test_freq: CountOrAll = -1
    """Trainer steps between validations; -1: none but before and after."""
    val_before_train: bool = True
    """Whether validation runs first."""
    val_only: bool = False
    """Whether the run ends after that."""
    anomaly_detection: bool = False
    """Whether updates run under autograd's anomaly detection, which names the operation that first gives NaN (slow)."""
    max_skipped_updates: PositiveInt | None = 10
    """Updates in a row whose loss or gradient is not finite (each is skipped) after which the run stops and writes the
    last one out for ``python -m hybridflow.replay``; None: it goes on."""
    critic_warmup: NonNegativeInt = 0
    """Trainer steps in which only the critic learns."""
    balance_batch: bool = True
    """Whether rows are balanced over ranks by their cost."""
    nnodes: PositiveInt = 1
    """Nodes."""
    n_gpus_per_node: PositiveInt = 1
    """Slots per node: GPUs, or logical slots on CPU."""
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    """auto, cpu or cuda."""
    controller: Annotated[str, OneOf(CONTROLLERS)] = "ray"
    """ray, or local (the same workers without Ray)."""
    pools: Mapping[str, PoolConfig] = field(default_factory=dict)
    """Further pools; roles not named there share the main one."""
    threads_per_worker: PositiveInt | None = None
    """Threads of a worker on CPU; None: cores / slots."""
    resume_mode: Annotated[str, OneOf(RESUME_MODES)] = "auto"
    """auto, disable or resume_path."""
    resume_from_path: str | None = None
    """resume_path: a ``global_step_N`` folder, or the URL of one of any fsspec file system, which is fetched first."""
    max_restarts: NonNegativeInt = 0
    """How often the run starts again by itself, from its last complete checkpoint, after a worker or node died or a
    deadline passed."""
    max_replica_restarts: NonNegativeInt = 3
    """How often each replica of a generator that has a pool to itself is started again after it died or hung, and its
    prompts generated anew, while the run goes on; the next loss ends the run, or leads to one of its max_restarts."""
    restart_backoff_s: NonNegativeFloat = 5.0
    """Seconds before a restart; doubled (up to 300) for each that follows another without a new checkpoint."""
    max_actor_ckpt_to_keep: PositiveInt | None = None
    """Checkpoints kept; None: all."""
    max_critic_ckpt_to_keep: PositiveInt | None = None
    """The same for the critic; must equal the actor's (one folder holds both)."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps that are multiples of it are kept beyond max_actor_ckpt_to_keep; None: none."""
    best_metric: str | None = None
    """Metric whose highest checkpoint is kept beyond max_actor_ckpt_to_keep (with a leading ``-`` the lowest; ties: the
    newest), measured at the step that saves; None: none."""
    checkpoint_copy: str | None = None
    """Folder of any fsspec file system (``s3://...``, ``hdfs://...``) that gets a copy of every checkpoint, and from
    which a run goes on whose own folder lacks it; None: none."""
    save_failure: Annotated[str, OneOf(SAVE_FAILURES)] = "stop"
    """What a checkpoint that the disk refuses leads to: stop, or warn and train on (``checkpoint/failed_saves``)."""
    log_val_generations: NonNegativeInt = 0
    """Validation samples handed to the trackers."""
    rollout_data_dir: Annotated[str, Folder()] | None = None
    """Folder of ``step_N.jsonl`` with every training sample; None: not written."""
    validation_data_dir: Annotated[str, Folder()] | None = None
    """The same for validation samples."""
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    """Deadlines."""
    dry_run: bool = False
    """Whether to validate, print the plan and end."""
    strict: bool = False
    """dry_run: whether what this machine lacks is fatal too."""

    def __post_init__(self) -> None:
        check_fields(self, self._faults())
        # The default folder is named after the run, also where no YAML interpolation has been at work.
        folder = self.default_local_dir
        for name in ("project_name", "experiment_name"):
            folder = folder.replace(f"${{trainer.{name}}}", getattr(self, name))
        object.__setattr__(self, "default_local_dir", folder)

    def _faults(self) -> Iterator[Problem]:
        if self.resume_mode == "resume_path" and self.resume_from_path is None:
            fix = "Give trainer.resume_from_path=.../global_step_N, or trainer.resume_mode=auto."
            yield Problem(key="resume_mode", given="resume_path", text="needs trainer.resume_from_path", fix=fix)
        if self.resume_mode != "resume_path" and self.resume_from_path is not None:
            text = f"is not read while trainer.resume_mode={self.resume_mode}"
            fix = "Set trainer.resume_mode=resume_path."
            yield Problem(key="resume_from_path", given=self.resume_from_path, text=text, fix=fix)
        if self.val_only and not self.val_before_train:
            text = "leaves nothing to do together with trainer.val_before_train=False"
            yield Problem(key="val_only", given="True", text=text, fix="Set trainer.val_before_train=True.")
        if len(set(self.logger)) < len(self.logger):
            yield Problem(key="logger", given=show(self.logger), text="names a tracker twice", fix="Name each once.")
        keep = {self.max_actor_ckpt_to_keep, self.max_critic_ckpt_to_keep}
        if self.max_critic_ckpt_to_keep is not None and len(keep) > 1:
            text = f"must equal trainer.max_actor_ckpt_to_keep={show(self.max_actor_ckpt_to_keep)}"
            fix = "Give both the same number, or leave out the critic's."
            yield Problem(key="max_critic_ckpt_to_keep", given=show(self.max_critic_ckpt_to_keep), text=text, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig(Section):
    """Arguments handed to Ray (``ray_kwargs.*``)."""

    ray_init: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``ray.init``: address joins a cluster, num_cpus, runtime_env ..."""
