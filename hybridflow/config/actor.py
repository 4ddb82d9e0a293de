"""Actor, reference and rollout: the roles that share one policy (``actor_rollout_ref.*``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridflow.config.choices import (
    GRADIENT_SYNC_ORDERS,
    IN_FLIGHT,
    KL_TYPES,
    LOAD_FORMATS,
    LOSS_AGG_MODES,
    PIPELINE_SCHEDULES,
    POLICY_LOSSES,
    ROLLOUT_ENGINES,
    ROLLOUT_MODES,
    TRAIN_STRATEGIES,
    VERIFY_MODES,
)
from hybridflow.config.constraints import (
    DType,
    NonNegativeFloat,
    OneOf,
    Only,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    Within,
)
from hybridflow.config.model import CheckpointContentsConfig, FSDPConfig, ModelConfig, OptimConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig(Section):
    """Which policy loss, and the numbers only some of them read."""

    loss_mode: Annotated[str, OneOf(POLICY_LOSSES, open=True)] = "vanilla"
    """Name of a registered policy loss, or ``package.module:function``."""
    clip_cov_ratio: Share = 0.0002
    """clip_cov: share of tokens that are detached."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of covariance."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper bound of covariance."""
    kl_cov_ratio: Share = 0.0002
    """kl_cov: share of tokens that carry the KL term."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """kl_cov: weight of the KL term."""
    tau_pos: PositiveFloat = 1.0
    """sapo: gate temperature of tokens with positive advantage."""
    tau_neg: PositiveFloat = 1.05
    """sapo: gate temperature of tokens with negative advantage."""
    dro_beta: NonNegativeFloat = 1.0
    """dro: weight of the quadratic log-ratio term."""
    dppo_threshold: PositiveFloat = 0.1
    """dppo_tv, dppo_kl: divergence above which a token that moves further away is masked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig(Section):
    """The policy in training."""

    strategy: Annotated[str, OneOf(TRAIN_STRATEGIES)] = "fsdp2"
    """Training engine."""
    ppo_mini_batch_size: PositiveInt = 64
    """Prompts per optimizer step, global; each brings ``rollout.n`` sequences."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward on one data-parallel coordinate; None: by token budget."""
    use_dynamic_bsz: bool | None = None
    """Whether micro-batches are cut by tokens; None: yes, unless ``ppo_micro_batch_size_per_gpu`` is given."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens of a micro-batch per device; a micro-batch holds up to this times sp."""
    ppo_epochs: PositiveInt = 1
    """Passes over the batch of a step."""
    shuffle: bool = False
    """Whether rows are shuffled (by group) before they are cut into mini-batches."""
    clip_ratio: NonNegativeFloat = 0.2
    """PPO clip on both sides where low/high are not given."""
    clip_ratio_low: NonNegativeFloat | None = None
    """Lower clip; None: ``clip_ratio``."""
    clip_ratio_high: NonNegativeFloat | None = None
    """Upper clip; None: ``clip_ratio``."""
    clip_ratio_c: Annotated[float, Within(above=1)] = 3.0
    """Dual-clip bound for negative advantages."""
    loss_agg_mode: Annotated[str, OneOf(LOSS_AGG_MODES)] = "token-mean"
    """How per-token losses become one number."""
    loss_scale_factor: PositiveFloat | None = None
    """seq-mean-token-sum-norm: the divisor; None: ``data.max_response_length``."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = True
    """Whether old-policy entropy is a metric even when its coefficient is 0."""
    use_kl_loss: bool = False
    """Whether the KL to the reference is a term of the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of that term."""
    kl_loss_type: Annotated[str, OneOf(KL_TYPES)] = "low_var_kl"
    """Its estimator."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Policy loss."""
    grad_clip: float = 1.0
    """Maximum global gradient norm; 0 or less: none."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    tensor_parallel_size: PositiveInt = 1
    """Tensor-parallel ranks of a replica."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline stages of a replica."""
    pipeline_schedule: Annotated[str, OneOf(PIPELINE_SCHEDULES)] = "1f1b"
    """Order of an update's micro-batches over the stages: ours (1f1b) takes them at their own lengths, torch's pad all
    to the longest and are not tried again with smaller ones where memory ends."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ulysses sequence-parallel ranks of a replica."""
    zero_stage: Annotated[int, Within(low=0, high=3)] | None = None
    """0 to 3; None: from ``fsdp_config``."""
    gradient_sync_order: Annotated[str, OneOf(GRADIENT_SYNC_ORDERS)] = "pipeline_first"
    """Stages finish accumulation, then data-parallel reduction, then the tied-embedding sum."""
    use_torch_compile: bool = False
    """Whether the model is compiled (GPU)."""
    use_prefix_grouper: bool = False
    """Whether a prompt is encoded once for all its samples that meet in a micro-batch; results are the same."""
    checkpoint: CheckpointContentsConfig = field(default_factory=CheckpointContentsConfig)
    """What is saved."""

    @property
    def sharding(self) -> FSDPConfig:
        """``fsdp_config`` as ``zero_stage`` wants it."""
        return self.fsdp_config.at_stage(self.zero_stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefConfig(Section):
    """The frozen reference policy."""

    strategy: Annotated[str, OneOf(TRAIN_STRATEGIES)] = "fsdp2"
    """Training engine used for its forward."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward; None: by token budget."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Whether micro-batches are cut by tokens; None: yes, unless ``log_prob_micro_batch_size_per_gpu`` is given."""
    log_prob_max_token_len_per_gpu: PositiveInt = 32768
    """Tokens of a micro-batch per device."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    tensor_parallel_size: PositiveInt = 1
    """Tensor-parallel ranks."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline stages."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ulysses ranks."""
    zero_stage: Annotated[int, Within(low=0, high=3)] | None = None
    """0 to 3; None: from ``fsdp_config``."""
    use_torch_compile: bool = False
    """Whether the model is compiled (GPU)."""
    use_prefix_grouper: bool | None = None
    """Whether a prompt is encoded once for all its samples; None: as the actor."""

    @property
    def sharding(self) -> FSDPConfig:
        """``fsdp_config`` as ``zero_stage`` wants it."""
        return self.fsdp_config.at_stage(self.zero_stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValSamplingConfig(Section):
    """Sampling of validation."""

    n: PositiveInt = 1
    """Samples per prompt."""
    do_sample: bool = True
    """False: greedy."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 means greedy."""
    top_k: Annotated[int, Within(low=-1)] | None = -1
    """-1, 0 or None: off."""
    top_p: Annotated[float, Within(above=0, high=1)] = 1.0
    """1: off."""
    greedy_too: bool = True
    """Whether a greedy pass is reported beside the sampled one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTransferConfig(Section):
    """How weights move from actor to generator."""

    update_weights_bucket_megabytes: PositiveInt = 64
    """Size of a transfer bucket; at most two exist per rank."""
    verify: Annotated[str, OneOf(VERIFY_MODES)] = "first"
    """When checksums of the generator's weights are compared with the actor's, and copies of them that its kernels have
    packed with the weights: at the first transfer, or always; then also, before each, with what the last one left, so
    that weights that changed on their own stop the run."""
    in_flight: Annotated[str, OneOf(IN_FLIGHT)] = "recompute"
    """What becomes of requests under which weights change: their keys and values are computed again, or kept (those of
    the old weights), or the requests are handed out as they are, invalid as samples (abort)."""
    attempts: PositiveInt = 2
    """Tries of one transfer, the first included; a try that breaks midway is logged and counted (publish/retries)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig(Section):
    """The generator."""

    name: Annotated[str, OneOf(ROLLOUT_ENGINES)] = "vllm"
    """vllm or hf."""
    mode: Annotated[str, OneOf(ROLLOUT_MODES)] = "sync"
    """Kept for existing scripts: sync and async are the same loop of single-turn prompts; async gives a note."""
    n: PositiveInt = 8
    """Samples per prompt (G)."""
    do_sample: Annotated[bool, Only(True, "training samples; only val_kwargs may be greedy")] = True
    """Kept for existing scripts: training rollouts always sample."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of training, > 0."""
    top_k: Annotated[int, Within(low=-1, high=0)] = -1
    """Off (-1 or 0) in training: the trainer's log-probs are of the whole distribution."""
    top_p: Annotated[float, Only(1, "the trainer's log-probs are of the whole distribution")] = 1.0
    """1 in training, for the same reason."""
    ignore_eos: bool = False
    """Whether generation runs to the length limit."""
    prompt_length: PositiveInt | None = None
    """None: ``data.max_prompt_length``."""
    response_length: PositiveInt | None = None
    """None: ``data.max_response_length``."""
    max_model_len: PositiveInt | None = None
    """Context of the engine; None: prompt + response."""
    dtype: DType = "fp32"
    """Weights and compute of the generator."""
    gpu_memory_utilization: Annotated[float, Within(above=0, high=1)] = 0.5
    """Share of a GPU the engine may take, in (0, 1]."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """KV cache of the CPU engine; None: sized for the batch."""
    tensor_model_parallel_size: PositiveInt = 1
    """Tensor-parallel ranks of a generation replica."""
    pipeline_model_parallel_size: Annotated[int, Only(1, "use tensor_model_parallel_size")] = 1
    """Pipeline stages of a generation replica; only 1 for now."""
    data_parallel_size: PositiveInt = 1
    """Replicas follow from the devices; given values are checked against them."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens of one engine step."""
    max_num_seqs: PositiveInt = 1024
    """Sequences of one engine step."""
    enforce_eager: bool = False
    """No CUDA graphs (always so on CPU)."""
    enable_chunked_prefill: bool = True
    """Off on CPU in any case: seeded requests crash there."""
    enable_prefix_caching: bool = True
    """Whether shared prompts are computed once."""
    free_cache_engine: bool = True
    """Whether KV cache and weights leave the GPU while training."""
    load_format: Annotated[str, OneOf(LOAD_FORMATS)] = "dummy"
    """Kept for existing scripts: weights come from the actor in any case."""
    disable_log_stats: bool = True
    """Kept for existing scripts: vLLM's own statistics are never computed; ``timing_s/*`` and ``perf/*`` are."""
    calculate_log_probs: bool = True
    """Kept for existing scripts: the sampler's log-probs are always kept."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per old-log-prob forward; None: by token budget."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Whether these micro-batches are cut by tokens; None: yes, unless their size is given."""
    log_prob_max_token_len_per_gpu: PositiveInt = 32768
    """Tokens of such a micro-batch per device."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    """Sampling of validation."""
    checkpoint_engine: WeightTransferConfig = field(default_factory=WeightTransferConfig)
    """Weight transfer."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """``vllm: {...}``: further arguments of the engine."""
    layered_summon: bool = False
    """Kept for existing scripts: weights always move slice by slice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorRolloutRefConfig(Section):
    """Policy: model, actor, reference, rollout."""

    hybrid_engine: bool = True
    """Kept for existing scripts: False asks for a pool of trainer.pools that hosts rollout, which alone decides whether
    actor and rollout share devices."""
    nccl_timeout: PositiveInt = 600
    """Seconds of a collective's deadline."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Policy model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """Training."""
    ref: RefConfig = field(default_factory=RefConfig)
    """Reference."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
