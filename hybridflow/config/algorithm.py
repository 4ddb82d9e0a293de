"""Estimators, KL, correction and filtering (``algorithm.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class KLControlConfig:
    """Coefficient of the KL in the reward."""

    type: str = "fixed"
    """fixed or adaptive."""
    kl_coef: float = 0.001
    """Coefficient (its first value when adaptive)."""
    target_kl: float = 0.1
    """adaptive: KL per token aimed at."""
    horizon: int = 10000
    """adaptive: sequences over which the coefficient doubles at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCorrectionConfig:
    """The sampler's log-probs against the trainer's (mismatch), apart from old against new (staleness)."""

    rollout_is: str | None = None
    """None, token or sequence: importance weights truncated at the threshold."""
    rollout_is_threshold: float = 2.0
    """Upper bound of a weight."""
    rollout_is_batch_normalize: bool = False
    """Whether weights are divided by their masked batch mean."""
    rollout_rs: str | None = None
    """Rejection: None, or one of token_k1, token_k2, token_k3, seq_sum_k1, ..., seq_mean_k3, seq_max_k2, seq_max_k3,
    token, sequence, geometric."""
    rollout_rs_threshold: str | float | None = None
    """Band of the rejection: ``"low_high"`` or one number."""
    rollout_token_veto_threshold: float | None = None
    """A row with a token weight below this is rejected."""
    bypass_mode: bool = False
    """Whether the sampler's log-probs stand in for old log-probs (no recomputation)."""
    loss_type: str = "ppo_clip"
    """bypass_mode: ppo_clip or reinforce."""
    guard_action: str = "warn"
    """When mismatch leaves the band: warn, fallback (recompute without correction) or stop."""
    guard_max_log_ratio: float | None = None
    """Band of the masked mean absolute log-ratio; None: no guard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): groups without spread are dropped and the batch topped up."""

    enable: bool = False
    """Whether groups are filtered."""
    metric: str = "score"
    """Raw metric whose spread is judged (never the shaped reward)."""
    max_num_gen_batches: int = 10
    """Generation rounds of one step at most."""
    on_exhausted: str = "train"
    """When rounds run out: train (on what exists), skip (the step) or error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardShapingConfig:
    """What happens to scores before credit is assigned."""

    normalize: bool = False
    """Running mean/std normalisation."""
    normalize_momentum: float = 0.99
    """Memory of the running statistics."""
    clip: float | None = None
    """Scores are clipped to +- this."""
    length_penalty: float = 0.0
    """Subtracted per response token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SafeRLHFConfig:
    """Reward against cost with a Lagrange multiplier."""

    enable: bool = False
    """Whether costs enter the advantage."""
    cost_limit: float = 0.0
    """Mean cost allowed."""
    multiplier_init: float = 1.0
    """First value of the multiplier."""
    multiplier_lr: float = 0.1
    """Step size of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """Credit assignment."""

    adv_estimator: str = "grpo"
    """Name of a registered estimator, or ``package.module:function``."""
    gamma: float = 1.0
    """Discount per policy token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """GRPO: divide by the group's standard deviation; False is Dr. GRPO."""
    use_kl_in_reward: bool = False
    """Whether the KL to the reference is subtracted from token rewards."""
    kl_penalty: str = "kl"
    """Its estimator."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Its coefficient."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Mismatch correction."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    """Reward shaping."""
    safe_rlhf: SafeRLHFConfig = field(default_factory=SafeRLHFConfig)
    """Safe-RLHF."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """gdpo: names of the reward components."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """gdpo: their weights; empty: all 1."""
    passk: int = 2
    """grpo_passk: k."""
    ptx_coef: float = 0.0
    """PPO-ptx: weight of the pretraining loss."""
    ptx_files: tuple[str, ...] = ()
    """PPO-ptx: text files."""
