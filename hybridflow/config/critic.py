"""The value model of PPO (``critic.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.config.model import CheckpointContentsConfig, FSDPConfig, ModelConfig, OptimConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticModelConfig(ModelConfig):
    """The critic's model; its sharding may stand here, where verl's scripts put it."""

    path: str | None = None
    """None: the actor's model with a new value head."""
    fsdp_config: FSDPConfig | None = None
    """verl's place for ``critic.fsdp``; given in one of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """The critic in training."""

    enable: bool | None = None
    """None: on when the estimator needs values."""
    strategy: str = "fsdp2"
    """Training engine."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """Model."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Optimizer."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step, global; None: the actor's."""
    ppo_micro_batch_size: int | None = None
    """Refused: use ``ppo_micro_batch_size_per_gpu``."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences per forward; None: by token budget."""
    forward_micro_batch_size_per_gpu: int | None = None
    """Sequences per value forward; None: as in training."""
    use_dynamic_bsz: bool = True
    """Whether micro-batches are cut by tokens."""
    ppo_max_token_len_per_gpu: int = 32768
    """Tokens of a micro-batch per device."""
    ppo_epochs: int | None = None
    """Passes over the batch; None: the actor's."""
    shuffle: bool = False
    """Whether rows are shuffled (by group) before they are cut."""
    cliprange_value: float = 0.5
    """Clip of the value loss."""
    loss_agg_mode: str = "token-mean"
    """How per-token losses become one number."""
    grad_clip: float = 1.0
    """Maximum global gradient norm."""
    tensor_parallel_size: int = 1
    """Tensor-parallel ranks."""
    pipeline_parallel_size: int = 1
    """Pipeline stages."""
    ulysses_sequence_parallel_size: int = 1
    """Ulysses ranks."""
    zero_stage: int | None = None
    """0 to 3; None: from ``fsdp``."""
    gradient_sync_order: str = "pipeline_first"
    """See the actor's."""
    checkpoint: CheckpointContentsConfig = field(default_factory=CheckpointContentsConfig)
    """What is saved."""
