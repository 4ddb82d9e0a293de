"""A policy loss of a user's own that reads a column which other losses do not get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hybridflow.algorithms.masking import keep
from hybridflow.config.actor import ActorConfig


def by_entropy(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
    old_entropy: Tensor,
    **columns: Any,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """``-A H log pi``: tokens at which the old policy was uncertain weigh more."""
    return -keep(advantages * old_entropy, mask) * keep(log_probs, mask), {"actor/entropy_weight": old_entropy}


by_entropy.needs = frozenset({"old_entropy"})  # type: ignore[attr-defined]
