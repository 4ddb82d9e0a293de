"""The value model of PPO (``critic.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hybridflow.config.choices import GRADIENT_SYNC_ORDERS, LOSS_AGG_MODES, PIPELINE_SCHEDULES, TRAIN_STRATEGIES
from hybridflow.config.constraints import NonNegativeFloat, OneOf, PositiveInt, Section, Within
from hybridflow.config.model import CheckpointContentsConfig, FSDPConfig, ModelConfig, OptimConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticModelConfig(ModelConfig):
    """The critic's model; its sharding may stand here, where verl's scripts put it."""

    path: str | None = None
    """None: the actor's model with a new value head, which starts at 0."""
    fsdp_config: FSDPConfig | None = None
    """verl's place for ``critic.fsdp``; given in one of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig(Section):
    """The critic in training."""

    enable: bool | None = None
    """None: on when the estimator needs values."""
    strategy: Annotated[str, OneOf(TRAIN_STRATEGIES)] = "fsdp2"
    """Training engine."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """Model."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Optimizer."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step, global; None: the actor's."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward; None: by token budget."""
    forward_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per value forward; None: as in training."""
    use_dynamic_bsz: bool | None = None
    """Whether micro-batches are cut by tokens; None: yes, unless ``ppo_micro_batch_size_per_gpu`` is given."""
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Tokens of a micro-batch per device."""
    ppo_epochs: PositiveInt | None = None
    """Passes over the batch; None: the actor's."""
    shuffle: bool = False
    """Whether rows are shuffled (by group) before they are cut."""
    cliprange_value: NonNegativeFloat = 0.5
    """Clip of the value loss."""
    loss_agg_mode: Annotated[str, OneOf(LOSS_AGG_MODES)] = "token-mean"
    """How per-token losses become one number."""
    grad_clip: float = 1.0
    """Maximum global gradient norm."""
    tensor_parallel_size: PositiveInt = 1
    """Tensor-parallel ranks."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline stages."""
    pipeline_schedule: Annotated[str, OneOf(PIPELINE_SCHEDULES)] = "1f1b"
    """See the actor's."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ulysses ranks."""
    zero_stage: Annotated[int, Within(low=0, high=3)] | None = None
    """0 to 3; None: from ``fsdp``."""
    gradient_sync_order: Annotated[str, OneOf(GRADIENT_SYNC_ORDERS)] = "pipeline_first"
    """See the actor's."""
    use_prefix_grouper: bool = False
    """Whether a prompt is encoded once for all its samples that meet in a micro-batch; values are the same."""
    checkpoint: CheckpointContentsConfig = field(default_factory=CheckpointContentsConfig)
    """What is saved."""

    @property
    def sharding(self) -> FSDPConfig:
        """``fsdp`` as ``zero_stage`` wants it."""
        return self.fsdp.at_stage(self.zero_stage)
