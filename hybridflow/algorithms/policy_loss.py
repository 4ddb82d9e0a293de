"""Policy losses: per-token terms to *minimise*, without aggregation (``aggregation.py`` does that for all of them).

Every function takes the same keyword-only tensors and returns ``(losses, measures)``: ``losses[b, t]`` is the term of
one token, ``measures`` maps a metric's name to a per-token quantity whose masked mean is logged. ``ratio`` r is
``exp(log_probs - old_log_probs)``, A the advantage. A term depends on its own row alone, so any cut into micro-batches
gives the same sum. A user's own function (``loss_mode=package.module:function``) has this signature; columns that it
reads beyond those that every loss gets (``workers/actor.py``: ``CREDIT``) stand in its attribute ``needs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.masking import keep, masked_mean
from hybridflow.config.actor import ActorConfig
from hybridflow.utils.errors import ColumnError, ConfigError
from hybridflow.utils.optional import load

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here before ``exp``: float32 overflows at 88, and e^20 is outside of every clip range."""

Losses = tuple[Float[Tensor, "b T"], Mapping[str, Tensor]]


@runtime_checkable
class PolicyLoss(Protocol):
    """Per-token loss and measures."""

    def __call__(
        self,
        *,
        log_probs: Float[Tensor, "b T"],
        old_log_probs: Float[Tensor, "b T"],
        advantages: Float[Tensor, "b T"],
        mask: Bool[Tensor, "b T"],
        config: ActorConfig,
        **columns: Any,
    ) -> Losses:
        """See the module docstring."""
        ...


def log_ratio(
    log_probs: Float[Tensor, "b T"], old_log_probs: Float[Tensor, "b T"], mask: Bool[Tensor, "b T"]
) -> Float[Tensor, "b T"]:
    """``log_probs - old_log_probs`` in float32 or better, 0 at masked positions, within +-20."""
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    difference = keep(log_probs.to(wide), mask) - keep(old_log_probs.to(wide), mask)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """Lower and upper clip distance from 1."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def vanilla(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """PPO's clipped surrogate, with a lower and an upper distance and the dual clip.

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and for A < 0 at most ``-A c``. Sources: PPO arXiv:1707.06347; dual
    clip arXiv:1912.09729; two distances (clip-higher) arXiv:2503.14476. The clip fractions count tokens whose loss the
    clip changed, not ratios outside of the band: where the advantage's sign makes the clip idle it is not counted.
    """
    ratio, advantages = log_ratio(log_probs, old_log_probs, mask).exp(), keep(advantages, mask)
    plain, clipped = _clipped_surrogate(ratio, advantages, config)
    ceiling = -advantages * config.clip_ratio_c
    bounded = torch.where(advantages < 0, torch.minimum(clipped, ceiling), clipped)
    return bounded, {
        "actor/pg_clipfrac": clipped > plain,
        "actor/pg_clipfrac_lower": (advantages < 0) & (clipped > ceiling),
    }


def gspo(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """PPO's clipped surrogate of the row's length-normalised ratio ``s = exp(mean log r)`` (GSPO, arXiv:2507.18071).

    In the token form of the paper's section 4.3: every token carries ``s`` in value and its own log-prob in gradient,
    which for one advantage per row has the gradient of the row form. Rows are averaged whatever ``loss_agg_mode`` says.
    Clip distances of this loss are of the order 3e-4, not 0.2.
    """
    difference, advantages = log_ratio(log_probs, old_log_probs, mask), keep(advantages, mask)
    row_mean = masked_mean(difference.detach(), mask, dim=1)[:, None]
    ratio = (difference - difference.detach() + row_mean).exp()
    plain, clipped = _clipped_surrogate(ratio, advantages, config)
    return keep(clipped, mask), {"actor/pg_clipfrac": clipped > plain}


def geo_mean(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """``-A exp(mean of clipped log r)``: the geometric mean of a row's clipped ratios (GMPO, arXiv:2507.20673).

    A token's log-ratio is clipped to ``[-low, high]`` on the side that its advantage's sign makes attractive (PPO's
    one-sided rule). Distances are in log space; the paper uses 0.4 on both sides. A row's advantage is the mean over
    its tokens. Rows are averaged whatever ``loss_agg_mode`` says.
    """
    low, high = clip_range(config)
    difference, advantages = log_ratio(log_probs, old_log_probs, mask), keep(advantages, mask)
    bounded = torch.where(advantages > 0, difference.clamp(max=high), difference.clamp(min=-low))
    bounded = torch.where(advantages == 0, difference, bounded)
    ratio = masked_mean(bounded, mask, dim=1).exp()
    row_loss = -masked_mean(advantages, mask, dim=1) * ratio
    return keep(row_loss[:, None].expand_as(difference), mask), {"actor/pg_clipfrac": bounded != difference}


def sapo(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """``-A (4 / tau) sigmoid(tau (r - 1))``: a soft gate in place of the clip (SAPO, arXiv:2511.20347).

    tau is ``tau_pos`` for A > 0 and ``tau_neg`` otherwise; at r = 1 the gradient is that of ``-A r``.
    """
    ratio, advantages = log_ratio(log_probs, old_log_probs, mask).exp(), keep(advantages, mask)
    settings = config.policy_loss
    tau = torch.where(advantages > 0, settings.tau_pos, settings.tau_neg).to(ratio.dtype)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, {}


def cispo(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """``-A sg(clip(r, 1 - low, 1 + high)) log pi``: the weight is clipped, no token loses its gradient.

    Source: MiniMax-M1, arXiv:2506.13585 (which clips from above only: a large ``clip_ratio_low`` does that).
    """
    low, high = clip_range(config)
    ratio = log_ratio(log_probs, old_log_probs, mask).exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return _weighted_log_probs(weight, log_probs, advantages, mask), {"actor/pg_clipfrac": weight != ratio}


def reinforce(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """``-A log pi``: the plain policy gradient, also under the name gpg (Williams 1992; GPG arXiv:2504.02546).

    Right only for rows of the current policy; older rows need correction weights.
    """
    return _weighted_log_probs(1.0, log_probs, advantages, mask), {}


def dro(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """``-(A log pi - beta / 2 (log r)^2)``: policy gradient with a quadratic pull to the old policy.

    Source: direct reward optimisation, arXiv:2405.19107, with the advantage in place of reward minus value.
    """
    difference = log_ratio(log_probs, old_log_probs, mask)
    pull = 0.5 * config.policy_loss.dro_beta * difference.square()
    return _weighted_log_probs(1.0, log_probs, advantages, mask) + pull, {}


def clip_cov(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """PPO's clipped surrogate where the selected tokens of high covariance count 0 (Clip-Cov, arXiv:2505.22617).

    Needs the column ``covariance_selected`` (``covariance.py`` says how and why it is chosen before the update).
    """
    ratio, advantages = log_ratio(log_probs, old_log_probs, mask).exp(), keep(advantages, mask)
    selected = _selected(columns)
    plain, clipped = _clipped_surrogate(ratio, advantages, config)
    return torch.where(selected, 0.0, clipped), {
        "actor/pg_clipfrac": clipped > plain,
        "actor/covariance_selected": selected,
    }


def kl_cov(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """``-A r``, plus ``ppo_kl_coef |log r|`` at the tokens of highest covariance (KL-Cov, arXiv:2505.22617).

    Nothing is clipped. Needs the column ``covariance_selected``.
    """
    difference, advantages = log_ratio(log_probs, old_log_probs, mask), keep(advantages, mask)
    selected = _selected(columns)
    penalty = torch.where(selected, config.policy_loss.ppo_kl_coef * difference.abs(), 0.0)
    return -advantages * difference.exp() + penalty, {"actor/covariance_selected": selected}


def dppo_tv(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """``-A r`` without the tokens whose binary total variation ``|p - p_old|`` exceeds the threshold and would grow.

    Source: DPPO, arXiv:2602.04879. ``p`` is the sampled token's probability. A token is masked only where the update
    would move it further away (A > 0 and p > p_old, or A < 0 and p < p_old).
    """
    share, old_share = _shares(log_probs, old_log_probs, mask)
    return _trust_region((share - old_share).abs(), log_probs, old_log_probs, advantages, mask, config)


def dppo_kl(
    *,
    log_probs: Float[Tensor, "b T"],
    old_log_probs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    config: ActorConfig,
    **columns: Any,
) -> Losses:
    """As ``dppo_tv``, with the binary KL ``KL(p_old || p)`` of "this token or another one" (arXiv:2602.04879)."""
    share, old_share = _shares(log_probs, old_log_probs, mask)
    tiny = torch.finfo(share.dtype).tiny
    rest, old_rest = (1 - share).clamp(min=tiny), (1 - old_share).clamp(min=tiny)
    divergence = (
        old_share * (old_share.clamp(min=tiny) / share.clamp(min=tiny)).log() + old_rest * (old_rest / rest).log()
    )
    return _trust_region(divergence, log_probs, old_log_probs, advantages, mask, config)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, config: ActorConfig) -> tuple[Tensor, Tensor]:
    low, high = clip_range(config)
    plain = -advantages * ratio
    return plain, torch.maximum(plain, -advantages * ratio.clamp(1 - low, 1 + high))


def _weighted_log_probs(weight: Tensor | float, log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    return -keep(advantages, mask) * weight * keep(log_probs.to(wide), mask)


def _shares(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    return keep(log_probs.detach().to(wide), mask).exp(), keep(old_log_probs.to(wide), mask).exp()


def _trust_region(
    divergence: Tensor, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> Losses:
    difference, advantages = log_ratio(log_probs, old_log_probs, mask), keep(advantages, mask)
    leaving = advantages * difference.detach() > 0
    masked = leaving & (divergence > config.policy_loss.dppo_threshold)
    return torch.where(masked, 0.0, -advantages * difference.exp()), {"actor/pg_clipfrac": masked}


def _selected(columns: Mapping[str, Any]) -> Tensor:
    if "covariance_selected" not in columns:
        raise ColumnError(
            "clip_cov and kl_cov need the column 'covariance_selected': give assign_credit policy_loss=..."
        )
    return columns["covariance_selected"]


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "gpg": reinforce,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "geo_mean": geo_mean,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "reinforce": reinforce,
}
SEQUENCE_LEVEL = frozenset({"gspo", "geo_mean"})
"""Losses of whole rows: aggregated as seq-mean-token-mean, which is the mean over rows, whatever is configured."""
COVARIANCE_LOSSES = frozenset({"clip_cov", "kl_cov"})
"""Losses that need the column ``covariance_selected``."""


def resolve(name: str) -> PolicyLoss:
    """The registered loss ``name`` or the user's own by dotted path.

    Raises:
        ConfigError: neither exists.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    if "." in name or ":" in name:
        return load(name)
    known = ", ".join(POLICY_LOSSES)
    raise ConfigError(f"policy loss {name!r} is unknown: use one of {known} or package.module:function")


def needs_of(name: str) -> frozenset[str]:
    """Columns that loss ``name`` reads beyond those that every loss gets; only a user's own may."""
    return frozenset() if name in POLICY_LOSSES else frozenset(vars(resolve(name)).get("needs", ()))


def refuse_other_shapes(name: str, found: object, mask: Bool[Tensor, "b T"]) -> None:
    """Nothing, if ``found`` is what a policy loss returns; a mean or a term per row would be broadcast in silence.

    Raises:
        ConfigError: it is not; says what came.
    """
    losses, measures = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(measures, Mapping):
        told = "(" + ", ".join(type(part).__name__ for part in found) + ")" if isinstance(found, tuple) else None
        came = told or type(found).__name__
    else:
        parts = {"losses": losses, **measures}
        wrong = {key: part for key, part in parts.items() if getattr(part, "shape", None) != mask.shape}
        if not wrong:
            return
        key, part = next(iter(wrong.items()))
        came = f"{key} of shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"{key} of {type(part).__name__}"
    raise ConfigError(
        f"actor_rollout_ref.actor.policy_loss.loss_mode={name} must return (losses, measures): a tensor of shape "
        f"{tuple(mask.shape)} (rows, tokens), not reduced, and a dict of such tensors, which may be empty: it returned "
        f"{came}"
    )
