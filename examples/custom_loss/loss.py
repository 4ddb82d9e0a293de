"""A policy loss of your own: the unclipped surrogate with a quadratic penalty on the ratio.

The signature is that of every registered loss (``hybridflow/algorithms/policy_loss.py``): per-token terms to minimise,
and per-token quantities whose masked mean is logged. Aggregation, entropy bonus, KL term and correction weights are
added by hybridflow, so the term of a token must depend on its own row alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hybridflow.algorithms.masking import keep
from hybridflow.algorithms.policy_loss import log_ratio
from hybridflow.config.actor import ActorConfig

PENALTY = 5.0


def quadratic_penalty(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
    **columns: Any,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """``-A r + penalty (r - 1)^2``: tokens are pulled back smoothly and never lose their gradient."""
    distance = log_ratio(log_probs, old_log_probs, mask).exp() - 1
    losses = -keep(advantages, mask) * (distance + 1) + PENALTY * distance.square()
    return losses, {"actor/ratio_distance": distance.abs()}
