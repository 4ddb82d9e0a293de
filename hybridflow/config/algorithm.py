"""Estimators, KL, correction and filtering (``algorithm.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hybridflow.config.choices import (
    ADV_ESTIMATORS,
    BYPASS_LOSSES,
    EXHAUSTED_ACTIONS,
    GUARD_ACTIONS,
    IS_LEVELS,
    KL_CONTROLLERS,
    KL_TYPES,
    REJECTIONS,
)
from hybridflow.config.constraints import (
    Momentum,
    NonNegativeFloat,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    Within,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KLControlConfig(Section):
    """Coefficient of the KL in the reward."""

    type: Annotated[str, OneOf(KL_CONTROLLERS)] = "fixed"
    """fixed or adaptive."""
    kl_coef: NonNegativeFloat = 0.001
    """Coefficient (its first value when adaptive)."""
    target_kl: PositiveFloat = 0.1
    """adaptive: KL per token aimed at."""
    horizon: PositiveInt = 10000
    """adaptive: sequences over which the coefficient changes by a fifth (more in one step count as that many)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCorrectionConfig(Section):
    """The sampler's log-probs against the trainer's (mismatch), apart from old against new (staleness)."""

    rollout_is: Annotated[str, OneOf(IS_LEVELS)] | None = None
    """None, token or sequence: importance weights truncated at the threshold."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Upper bound of a weight."""
    rollout_is_batch_normalize: bool = False
    """Whether weights are divided by their masked batch mean."""
    rollout_rs: Annotated[str, OneOf(REJECTIONS, several=True)] | None = None
    """Rejection by these bounds (``level_statistic``, with commas between); None: none."""
    rollout_rs_threshold: str | float | None = None
    """Band of the rejection: ``"low_high"`` or one number."""
    rollout_token_veto_threshold: Annotated[float, Within(above=0, below=1)] | None = None
    """A row with a token weight below this is rejected."""
    bypass_mode: bool = False
    """Whether the sampler's log-probs stand in for old log-probs (no recomputation)."""
    loss_type: Annotated[str, OneOf(BYPASS_LOSSES)] = "ppo_clip"
    """bypass_mode: ppo_clip or reinforce."""
    guard_action: Annotated[str, OneOf(GUARD_ACTIONS)] = "warn"
    """When mismatch leaves the band: warn, fallback (no correction in this step) or stop."""
    guard_max_log_ratio: PositiveFloat | None = None
    """Band of the masked mean absolute log-ratio; None: no guard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): groups without spread are dropped and the batch topped up."""

    enable: bool = False
    """Whether groups are filtered."""
    metric: str = "score"
    """Raw metric whose spread is judged (never the shaped reward)."""
    max_num_gen_batches: PositiveInt = 10
    """Generation rounds of one step at most."""
    on_exhausted: Annotated[str, OneOf(EXHAUSTED_ACTIONS)] = "train"
    """When rounds run out: train (on what exists), skip (the step) or error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardShapingConfig(Section):
    """What happens to scores before credit is assigned."""

    normalize: bool = False
    """Running mean/std normalisation."""
    normalize_momentum: Momentum = 0.99
    """Memory of the running statistics."""
    clip: PositiveFloat | None = None
    """Scores are clipped to +- this."""
    length_penalty: NonNegativeFloat = 0.0
    """Subtracted per response token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SafeRLHFConfig(Section):
    """Reward against cost with a Lagrange multiplier."""

    enable: bool = False
    """Whether costs enter the advantage."""
    cost_key: str = "cost"
    """Name of the cost in the dict that the reward function returns."""
    cost_limit: float = 0.0
    """Mean cost allowed."""
    multiplier_init: NonNegativeFloat = 1.0
    """First value of the multiplier; 0 (with ``multiplier_lr=0``): costs are watched and not weighed."""
    multiplier_lr: NonNegativeFloat = 0.1
    """Step size of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig(Section):
    """Credit assignment."""

    adv_estimator: Annotated[str, OneOf(ADV_ESTIMATORS, open=True)] = "grpo"
    """Name of a registered estimator, or ``package.module:function``."""
    gamma: Share = 1.0
    """Discount per policy token."""
    lam: Share = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """GRPO: divide by the group's standard deviation; False is Dr. GRPO."""
    use_kl_in_reward: bool = False
    """Whether the KL to the reference is subtracted from token rewards."""
    kl_penalty: Annotated[str, OneOf(KL_TYPES)] = "kl"
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
    passk: PositiveInt = 2
    """grpo_passk: k."""
    ptx_coef: NonNegativeFloat = 0.0
    """PPO-ptx: weight of the loss on text, in nats per token (0: off)."""
    ptx_files: tuple[str, ...] = ()
    """PPO-ptx: ``.txt`` (one document) and ``.jsonl`` (a document in the key ``text`` of each line) files."""
    ptx_batch_size: PositiveInt | None = None
    """PPO-ptx: blocks of text per optimizer step, global; None: as many as the mini-batch has sequences."""
    ptx_length: Annotated[int, Within(low=2)] | None = None
    """PPO-ptx: tokens of a block; None: the longest prompt and response together."""
