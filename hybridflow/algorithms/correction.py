"""Mismatch: the sampler's log-probs against the trainer's for the same weights and tokens (``rollout_correction``).

    mismatch   old / rollout    this file: weights, rejection, veto, guard
    staleness  current / old    the policy loss: clipping

The two ratios are never mixed: they have separate thresholds and separate metrics (``rollout_corr/*`` here, ``actor/*``
there). With weights this is decoupled PPO (arXiv:2110.00641). In bypass mode there is no old policy of the trainer:
the sampler's log-probs stand in for it, and current / rollout is judged inside the loss.

Rejection is written ``level_statistic`` with the log-ratio x = old - rollout of a token: k1 = -x, k2 = x^2 / 2,
k3 = e^x - 1 - x; level token, or seq_sum, seq_mean, seq_max over a row. k1 is bounded as a *ratio* on both sides (one
number h stands for [1/h, h]); k2 and k3 from above. Shorter names: token = token_k1 (IcePop, arXiv:2510.18855),
sequence = seq_sum_k1 (masked importance sampling), geometric = seq_mean_k1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.masking import keep, masked_mean, masked_moments
from hybridflow.config.algorithm import RolloutCorrectionConfig
from hybridflow.config.rejection import SHORT_NAMES, Rejection, UnreadableRejectionError, read_rejections
from hybridflow.utils.errors import ConfigError, EngineError

LOG_RATIO_LIMIT = 20.0
"""Log-ratios (of a token or a row) are clamped here before ``exp``."""

_STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: x.clamp(max=LOG_RATIO_LIMIT).exp() - 1 - x,
}
REJECTIONS: tuple[str, ...] = (
    *(f"token_{k}" for k in _STATISTICS),
    *(f"seq_{how}_{k}" for how in ("sum", "mean") for k in _STATISTICS),
    "seq_max_k2",
    "seq_max_k3",
    *SHORT_NAMES,
)
IS_LEVELS: tuple[str, ...] = ("token", "sequence")
GUARD_ACTIONS: tuple[str, ...] = ("warn", "fallback", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What credit assignment does about mismatch."""

    mask: Bool[Tensor, "B T"]
    """The mask without rejected tokens and rows."""
    weights: Float[Tensor, "B T"] | None
    """Importance weights without gradient, 0 at masked positions; None: all 1."""
    metrics: dict[str, float] = field(default_factory=dict)


def rejections(config: RolloutCorrectionConfig) -> tuple[Rejection, ...]:
    """The configured bounds (``config/rejection.py``).

    Raises:
        ConfigError: an unknown name, or a threshold that is missing or does not fit.
    """
    try:
        return read_rejections(config.rollout_rs, config.rollout_rs_threshold, config.rollout_is_threshold)
    except UnreadableRejectionError as error:
        key = f"algorithm.rollout_correction.{error.field}"
        raise ConfigError(f"{key}={getattr(config, error.field)!r}: {error.text}") from error


def importance_weights(
    *,
    log_ratio: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    config: RolloutCorrectionConfig,
    kept: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Truncated weights without gradient, 0 at masked positions: ``min(ratio, rollout_is_threshold)``.

    token: of each token (TIS). sequence: of the row's product, on each of its tokens. Batch normalisation divides by
    the mean over tokens (token) or over rows (sequence), after the truncation. ``kept`` are the tokens of ``mask`` that
    were not rejected: others get 0 and are in no mean, but stay in the product, since the policy did write them.

    Raises:
        ConfigError: an unknown ``rollout_is``.
    """
    if config.rollout_is not in IS_LEVELS:
        allowed = ", ".join(IS_LEVELS)
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={config.rollout_is!r}: use one of {allowed} or null"
        )
    kept = mask if kept is None else kept
    weights = keep(_truncated(log_ratio.detach(), mask, config), kept)
    if config.rollout_is_batch_normalize:
        if config.rollout_is == "token":
            scale = masked_mean(weights, kept)
        else:
            scale = masked_mean(masked_mean(weights, kept, dim=1), kept.any(dim=1))
        weights = weights / scale if float(scale) > 0 else weights
    return weights


def _truncated(log_ratio: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    ratio = keep(log_ratio, mask)
    if config.rollout_is == "sequence":
        ratio = ratio.sum(dim=1, keepdim=True).expand_as(ratio)
    ratio = ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return keep(ratio.clamp(max=config.rollout_is_threshold), mask)


def accepted(
    *, log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], config: RolloutCorrectionConfig
) -> Bool[Tensor, "B T"]:
    """``mask`` without what a bound or the veto rejects; each bound judges the whole row, whatever others reject."""
    log_ratio = keep(log_ratio.detach(), mask)
    kept = mask
    for bound in rejections(config):
        statistic = keep(_STATISTICS[bound.statistic](log_ratio), mask)
        if bound.whole_rows:
            statistic = _over_row(statistic, mask, bound.level)[:, None]
        if bound.statistic == "k1":
            # Compared as logarithms: exp of a long row's sum may overflow.
            low = math.log(bound.low) if bound.low > 0 else -math.inf
            inside = (-statistic >= low) & (-statistic <= math.log(bound.high))
        else:
            inside = statistic <= bound.high
        kept = kept & inside
    if config.rollout_token_veto_threshold is not None:
        vetoed = mask & (log_ratio < math.log(config.rollout_token_veto_threshold))
        kept = kept & ~vetoed.any(dim=1)[:, None]
    return kept


def _over_row(statistic: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "seq_sum":
        return statistic.sum(dim=1)
    if level == "seq_mean":
        return masked_mean(statistic, mask, dim=1)
    return statistic.amax(dim=1) if statistic.shape[1] else statistic.sum(dim=1)


def correct(
    *,
    old_log_probs: Float[Tensor, "B T"],
    rollout_log_probs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    config: RolloutCorrectionConfig,
) -> Correction:
    """Weights, rejection and metrics of the mismatch between trainer and sampler.

    The guard compares the masked mean of ``|old - rollout|`` with ``guard_max_log_ratio``: ``warn`` reports (metric
    rollout_corr/guard_tripped), ``fallback`` leaves mask and weights alone for this step, ``stop`` raises.

    Raises:
        ConfigError: an unknown name in the configuration.
        EngineError: the guard tripped with ``guard_action=stop``.
    """
    wide = torch.promote_types(old_log_probs.dtype, torch.float32)
    log_ratio = keep(old_log_probs.detach().to(wide), mask) - keep(rollout_log_probs.detach().to(wide), mask)
    metrics = mismatch_metrics(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    if _tripped(config, metrics):
        return Correction(mask=mask, weights=None, metrics=metrics)
    kept, weights = accepted(log_ratio=log_ratio, mask=mask, config=config), None
    if config.rollout_rs is not None or config.rollout_token_veto_threshold is not None:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = float(masked_mean((~kept).double(), mask))
        rows = mask.any(dim=1)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = float(masked_mean((~kept.any(dim=1)).double(), rows))
    if config.rollout_is is not None:
        weights = importance_weights(log_ratio=log_ratio, mask=mask, config=config, kept=kept)
        metrics |= weight_metrics(weights=weights, log_ratio=log_ratio, mask=mask, kept=kept, config=config)
    return Correction(mask=kept, weights=weights, metrics=metrics)


def _tripped(config: RolloutCorrectionConfig, metrics: dict[str, float]) -> bool:
    """Whether correction is off for this step; sets the guard's metric."""
    if config.guard_max_log_ratio is None:
        return False
    found = metrics["rollout_corr/abs_log_ratio"]
    out = not found <= config.guard_max_log_ratio
    metrics["rollout_corr/guard_tripped"] = float(out)
    if out and config.guard_action == "stop":
        raise EngineError(
            f"the sampler's log-probs differ from the trainer's by {found:.3g} on average, more than "
            f"algorithm.rollout_correction.guard_max_log_ratio={config.guard_max_log_ratio}: the sampler's weights may "
            "be stale, or its precision too low; guard_action=warn goes on"
        )
    return out and config.guard_action == "fallback"


def mismatch_metrics(
    *, old_log_probs: Float[Tensor, "B T"], rollout_log_probs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> dict[str, float]:
    """How far the sampler is from the trainer, before any correction; empty without trainable tokens.

    kl and k3_kl estimate KL(rollout || old) in nats per token; chi2 is ``mean ratio^2 - 1`` over tokens and over rows;
    ppl is ``exp`` of the mean negative log-prob of a row, averaged over rows; log_ppl_diff is trainer minus sampler.
    """
    if not bool(mask.any()):
        return {"rollout_corr/abs_log_ratio": 0.0}
    old, rollout = keep(old_log_probs.detach().double(), mask), keep(rollout_log_probs.detach().double(), mask)
    x, rows = old - rollout, mask.any(dim=1)
    bounded = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    total = x.sum(dim=1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    training, sampled = masked_mean(-old, mask, dim=1), masked_mean(-rollout, mask, dim=1)
    values = {
        "kl": masked_mean(-x, mask),
        "k3_kl": masked_mean(bounded.exp() - 1 - x, mask),
        "abs_log_ratio": masked_mean(x.abs(), mask),
        "max_abs_log_ratio": x.abs().amax(),
        "chi2_token": masked_mean((2 * bounded).exp(), mask) - 1,
        "chi2_seq": masked_mean((2 * total).exp(), rows) - 1,
        "training_ppl": masked_mean(training.exp(), rows),
        "rollout_ppl": masked_mean(sampled.exp(), rows),
        "log_ppl_diff": masked_mean(training - sampled, rows),
        "log_ppl_abs_diff": masked_mean((training - sampled).abs(), rows),
    }
    return {f"rollout_corr/{name}": float(value) for name, value in values.items()}


def weight_metrics(
    *,
    weights: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    kept: Bool[Tensor, "B T"],
    config: RolloutCorrectionConfig,
) -> dict[str, float]:
    """Distribution of the weights over the tokens that are ``kept``; empty without any."""
    if not bool(kept.any()):
        return {}
    mean, variance = masked_moments(weights, kept)
    picked = weights[kept].double()
    low, high = picked.aminmax()
    raw = keep(log_ratio, mask)
    if config.rollout_is == "sequence":
        raw = raw.sum(dim=1, keepdim=True).expand_as(raw)
    above = masked_mean((raw > math.log(config.rollout_is_threshold)).double(), kept)
    values = {
        "rollout_is_mean": mean,
        "rollout_is_std": variance.sqrt(),
        "rollout_is_max": high,
        "rollout_is_min": low,
        "rollout_is_ratio_fraction_high": above,
        "rollout_is_eff_sample_size": picked.sum().square() / (picked.square().sum() * len(picked)).clamp(min=1e-300),
    }
    return {f"rollout_corr/{name}": float(value) for name, value in values.items()}
