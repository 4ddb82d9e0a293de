"""Policy losses: per-token terms to *minimise*, without aggregation (``aggregation.py`` does that for all of them).

Every function takes the same keyword-only tensors and returns ``(losses, measures)``: ``losses[b, t]`` is the term of
one token, ``measures`` maps a metric's name to a per-token quantity whose masked mean is logged. ``ratio`` is
``exp(log_probs - old_log_probs)``. A user's own function (``loss_mode=package.module:function``) has this signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.masking import keep
from hybridflow.config.actor import ActorConfig
from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here before ``exp``: float32 overflows at 88, and e^20 is outside of every clip range."""

Losses = tuple[Float[Tensor, "b T"], Mapping[str, Tensor]]


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
    low, high = clip_range(config)
    ratio = log_ratio(log_probs, old_log_probs, mask).exp()
    advantages = keep(advantages, mask)
    plain = -advantages * ratio
    clipped = torch.maximum(plain, -advantages * ratio.clamp(1 - low, 1 + high))
    ceiling = -advantages * config.clip_ratio_c
    bounded = torch.where(advantages < 0, torch.minimum(clipped, ceiling), clipped)
    return bounded, {
        "actor/pg_clipfrac": clipped > plain,
        "actor/pg_clipfrac_lower": (advantages < 0) & (clipped > ceiling),
    }


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
}
SEQUENCE_LEVEL: frozenset[str] = frozenset()


def resolve(name: str) -> PolicyLoss:
    """The registered loss ``name`` or the user's own by dotted path.

    Raises:
        ConfigError: neither exists.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    if "." in name or ":" in name:
        return load(name)
    raise ConfigError(
        f"policy loss {name!r} is unknown: use one of {', '.join(POLICY_LOSSES)} or package.module:function"
    )
