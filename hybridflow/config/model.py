"""Model, optimizer and sharding settings shared by actor, reference, critic and reward model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from hybridflow.config.choices import (
    CHECKPOINTING_MODES,
    LOADED_CONTENTS,
    LR_SCHEDULES,
    OPTIMIZERS,
    SAVED_CONTENTS,
    SCHEDULE_UNITS,
)
from hybridflow.config.constraints import (
    CountOrAll,
    DType,
    Momentum,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    Only,
    PositiveFloat,
    Section,
    Share,
    Within,
)
from hybridflow.config.data import BUILTIN_TASK


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Section):
    """A Hugging Face model folder and how it is run."""

    path: str = BUILTIN_TASK
    """Model folder or hub name; ``builtin:arithmetic`` is the tiny warm start that ships with hybridflow."""
    tokenizer_path: str | None = None
    """Tokenizer folder; None: the model's."""
    trust_remote_code: bool = False
    """Whether model files may bring code."""
    override_config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the HF config that are replaced at load."""
    use_remove_padding: Annotated[bool, Only(True, "rows are always packed")] = True
    """Kept for existing scripts: rows are always packed."""
    enable_gradient_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass."""
    gradient_checkpointing_mode: Annotated[str, OneOf(CHECKPOINTING_MODES)] = "full"
    """What is recomputed then: whole layers (full), or all but matrix products and attention (selective)."""
    enable_activation_offload: bool = False
    """Whether saved activations wait in host memory."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters; 0: train all weights."""
    lora_alpha: PositiveFloat = 16.0
    """LoRA scale numerator."""
    use_rslora: bool = False
    """Whether the LoRA scale divides by sqrt(rank) in place of rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get adapters."""
    exclude_modules: str | None = None
    """Pattern of modules that get none."""
    lora_adapter_path: str | None = None
    """Adapter folder to start from."""
    lora_merge: bool = True
    """Whether the actor adds its adapters in before weights travel, so that every adapted weight moves. False: only
    adapters move, and the generator merges them into a copy of the base that it keeps."""
    use_liger: bool = False
    """Whether liger kernels replace HF's on GPU."""

    @property
    def lora_scale(self) -> float:
        """``s`` of ``W + s B A``."""
        return self.lora_alpha / (self.lora_rank**0.5 if self.use_rslora else self.lora_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig(Section):
    """Optimizer and learning-rate schedule."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    optimizer: Annotated[str, OneOf(OPTIMIZERS, open=True)] = "AdamW"
    """``AdamW``; ``Muon`` (matrices inside layers, AdamW for the rest); or the dotted path of an optimizer class."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """Adam moments' decay."""
    eps: PositiveFloat = 1e-8
    """Adam's denominator term."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; norms and biases are left out."""
    lr_warmup_steps: Annotated[int, Within(low=-1)] = -1
    """Warm-up length in schedule units; -1: from the ratio."""
    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of all steps."""
    lr_scheduler_type: Annotated[str, OneOf(LR_SCHEDULES)] = "constant"
    """constant, linear or cosine, after the warm-up."""
    min_lr_ratio: Share = 0.0
    """Floor of the decay as a share of ``lr``."""
    schedule_unit: Annotated[str, OneOf(SCHEDULE_UNITS)] = "trainer_step"
    """What advances the schedule: trainer_step (as verl) or optimizer_step."""
    override_optimizer_config: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecisionConfig(Section):
    """Dtypes of FSDP's mixed precision."""

    param_dtype: DType = "fp32"
    """Dtype of forward and backward."""
    reduce_dtype: DType = "fp32"
    """Dtype of gradient reduction."""
    buffer_dtype: DType = "fp32"
    """Dtype of buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPConfig(Section):
    """Sharding of a training engine."""

    fsdp_size: CountOrAll = -1
    """Ranks of a shard group; -1: all data-parallel ranks; less: HSDP (replicas of shard groups)."""
    reshard_after_forward: bool = True
    """ZeRO-3 when True, ZeRO-2 when False."""
    param_offload: bool = False
    """Whether parameters wait in host memory while the role is idle."""
    optimizer_offload: bool = False
    """Whether optimizer states wait in host memory while the role is idle."""
    offload_policy: bool = False
    """FSDP2's CPUOffloadPolicy."""
    forward_prefetch: bool = False
    """Whether the next layer is gathered during the current one."""
    model_dtype: DType = "fp32"
    """Dtype of the master weights."""
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)
    """Compute, reduction and buffer dtypes."""
    entropy_from_logits_with_chunking: bool = True
    """Kept for existing scripts: entropy is always computed in chunks when it pays."""
    entropy_checkpointing: bool = False
    """Kept for existing scripts: the closed-form gradient needs no stored logits."""
    use_orig_params: bool = True
    """Kept for existing scripts: FSDP2 always keeps the original parameters."""

    def at_stage(self, zero_stage: int | None) -> FSDPConfig:
        """This sharding at a ZeRO stage: 3 gathers a layer twice, 1 and 2 keep it gathered; None: as configured.

        Stage 0 is a matter of the layout (``topology.resources.training_layout``): every rank is a replica.
        """
        if zero_stage is None:
            return self
        return replace(self, reshard_after_forward=zero_stage == 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContentsConfig(Section):
    """What a role's checkpoint holds."""

    save_contents: tuple[Annotated[str, OneOf(SAVED_CONTENTS)], ...] = ("model", "optimizer", "extra")
    """Of: model, optimizer, extra, hf_model."""
    load_contents: tuple[Annotated[str, OneOf(LOADED_CONTENTS)], ...] = ("model", "optimizer", "extra")
    """Of: model, optimizer, extra."""
    async_save: bool = False
    """Whether writing overlaps the next step."""
