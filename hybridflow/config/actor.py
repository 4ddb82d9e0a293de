"""Actor, reference and rollout: the roles that share one policy (``actor_rollout_ref.*``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.model import CheckpointContentsConfig, FSDPConfig, ModelConfig, OptimConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """Which policy loss, and the numbers only some of them read."""

    loss_mode: str = "vanilla"
    """Name of a registered policy loss, or ``package.module:function``."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of tokens that are detached."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of covariance."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper bound of covariance."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of tokens that carry the KL term."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of the KL term."""
    tau_pos: float = 1.0
    """sapo: gate temperature of tokens with positive advantage."""
    tau_neg: float = 1.05
    """sapo: gate temperature of tokens with negative advantage."""
    dro_beta: float = 1.0
    """dro: weight of the quadratic log-ratio term."""
    dppo_threshold: float = 0.1
    """dppo_tv, dppo_kl: divergence above which a token that moves further away is masked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig:
    """The policy in training."""

    strategy: str = "fsdp2"
    """Training engine."""
    ppo_mini_batch_size: int = 64
    """Prompts per optimizer step, global; each brings ``rollout.n`` sequences."""
    ppo_micro_batch_size: int | None = None
    """Refused: use ``ppo_micro_batch_size_per_gpu``."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences per forward on one data-parallel coordinate; None: by token budget."""
    use_dynamic_bsz: bool = True
    """Whether micro-batches are cut by tokens in place of sequences."""
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens of a micro-batch per device; a micro-batch holds up to this times sp."""
    ppo_epochs: int = 1
    """Passes over the batch of a step."""
    shuffle: bool = False
    """Whether rows are shuffled (by group) before they are cut into mini-batches."""
    clip_ratio: float = 0.2
    """PPO clip on both sides where low/high are not given."""
    clip_ratio_low: float | None = None
    """Lower clip; None: ``clip_ratio``."""
    clip_ratio_high: float | None = None
    """Upper clip; None: ``clip_ratio``."""
    clip_ratio_c: float = 3.0
    """Dual-clip bound for negative advantages."""
    loss_agg_mode: str = "token-mean"
    """How per-token losses become one number."""
    loss_scale_factor: float | None = None
    """seq-mean-token-sum-norm: the divisor; None: ``data.max_response_length``."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = True
    """Whether old-policy entropy is a metric even when its coefficient is 0."""
    use_kl_loss: bool = False
    """Whether the KL to the reference is a term of the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that term."""
    kl_loss_type: str = "low_var_kl"
    """Its estimator."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Policy loss."""
    grad_clip: float = 1.0
    """Maximum global gradient norm; 0 or less: none."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    tensor_parallel_size: int = 1
    """Tensor-parallel ranks of a replica."""
    pipeline_parallel_size: int = 1
    """Pipeline stages of a replica."""
    ulysses_sequence_parallel_size: int = 1
    """Ulysses sequence-parallel ranks of a replica."""
    zero_stage: int | None = None
    """0 to 3; None: from ``fsdp_config``."""
    gradient_sync_order: str = "pipeline_first"
    """Stages finish accumulation, then data-parallel reduction, then the tied-embedding sum."""
    use_torch_compile: bool = False
    """Whether the model is compiled (GPU)."""
    checkpoint: CheckpointContentsConfig = field(default_factory=CheckpointContentsConfig)
    """What is saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefConfig:
    """The frozen reference policy."""

    strategy: str = "fsdp2"
    """Training engine used for its forward."""
    log_prob_micro_batch_size: int | None = None
    """Refused: use ``log_prob_micro_batch_size_per_gpu``."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences per forward; None: by token budget."""
    log_prob_use_dynamic_bsz: bool = True
    """Whether micro-batches are cut by tokens."""
    log_prob_max_token_len_per_gpu: int = 32768
    """Tokens of a micro-batch per device."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    tensor_parallel_size: int = 1
    """Tensor-parallel ranks."""
    pipeline_parallel_size: int = 1
    """Pipeline stages."""
    ulysses_sequence_parallel_size: int = 1
    """Ulysses ranks."""
    zero_stage: int | None = None
    """0 to 3; None: from ``fsdp_config``."""
    use_torch_compile: bool = False
    """Whether the model is compiled (GPU)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValSamplingConfig:
    """Sampling of validation."""

    n: int = 1
    """Samples per prompt."""
    do_sample: bool = True
    """False: greedy."""
    temperature: float = 1.0
    """Sampling temperature; 0 means greedy."""
    top_k: int = -1
    """-1, 0 or None: off."""
    top_p: float = 1.0
    """1: off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTransferConfig:
    """How weights move from actor to generator."""

    update_weights_bucket_megabytes: int = 64
    """Size of a transfer bucket; at most two exist per rank."""
    verify: str = "first"
    """When checksums of the generator's weights are compared with the actor's: first, always, never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """The generator."""

    name: str = "vllm"
    """vllm or hf."""
    mode: str = "sync"
    """sync or async: how requests are driven (both own the engine's step loop)."""
    n: int = 8
    """Samples per prompt (G)."""
    do_sample: bool = True
    """Training rollouts always sample; False is refused."""
    temperature: float = 1.0
    """Sampling temperature of training, > 0."""
    top_k: int = -1
    """Refused in training unless off: the trainer's log-probs are of the whole distribution."""
    top_p: float = 1.0
    """Refused in training unless 1."""
    ignore_eos: bool = False
    """Whether generation runs to the length limit."""
    prompt_length: int | None = None
    """None: ``data.max_prompt_length``."""
    response_length: int | None = None
    """None: ``data.max_response_length``."""
    max_model_len: int | None = None
    """Context of the engine; None: prompt + response."""
    dtype: str = "fp32"
    """Weights and compute of the generator."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU the engine may take, in (0, 1]."""
    kv_cache_memory_bytes: int | None = None
    """KV cache of the CPU engine; None: sized for the batch."""
    tensor_model_parallel_size: int = 1
    """Tensor-parallel ranks of a generation replica."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages of a generation replica; only 1 for now."""
    data_parallel_size: int = 1
    """Replicas follow from the devices; given values are checked against them."""
    max_num_batched_tokens: int = 8192
    """Tokens of one engine step."""
    max_num_seqs: int = 1024
    """Sequences of one engine step."""
    enforce_eager: bool = False
    """No CUDA graphs (always so on CPU)."""
    enable_chunked_prefill: bool = True
    """Off on CPU in any case: seeded requests crash there."""
    enable_prefix_caching: bool = True
    """Whether shared prompts are computed once."""
    free_cache_engine: bool = True
    """Whether KV cache and weights leave the GPU while training."""
    load_format: str = "dummy"
    """Weights come from the actor in any case; verl's other values are accepted."""
    disable_log_stats: bool = True
    """No vLLM statistics in the log."""
    calculate_log_probs: bool = True
    """Accepted for verl's scripts: the sampler's log-probs are always kept."""
    log_prob_micro_batch_size: int | None = None
    """Refused: use ``log_prob_micro_batch_size_per_gpu``."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences per old-log-prob forward; None: by token budget."""
    log_prob_use_dynamic_bsz: bool = True
    """Whether these micro-batches are cut by tokens."""
    log_prob_max_token_len_per_gpu: int = 32768
    """Tokens of such a micro-batch per device."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    """Sampling of validation."""
    checkpoint_engine: WeightTransferConfig = field(default_factory=WeightTransferConfig)
    """Weight transfer."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """``vllm: {...}``: further arguments of the engine."""
    layered_summon: bool = False
    """Accepted for verl's scripts: weights always move slice by slice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorRolloutRefConfig:
    """Policy: model, actor, reference, rollout."""

    hybrid_engine: bool = True
    """Actor and rollout share devices."""
    nccl_timeout: int = 600
    """Seconds of a collective's deadline."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Policy model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """Training."""
    ref: RefConfig = field(default_factory=RefConfig)
    """Reference."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
