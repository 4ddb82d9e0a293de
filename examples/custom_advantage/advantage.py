"""An advantage estimator of your own: the score against the median of the group.

The signature is that of every registered estimator (``hybridflow/algorithms/advantages.py``): keyword-only tensors in,
``(advantages, returns)`` out, 0 at masked positions. Columns of the step (``score``, ``response_length``,
``old_log_probs``, ...) arrive by name; take what you need and leave the rest to ``**columns``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.returns import outcome, spread_over_tokens
from hybridflow.config.algorithm import AlgorithmConfig


def median_baseline(
    *, token_rewards: Tensor, mask: Tensor, group_id: Tensor, config: AlgorithmConfig, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Outcome minus the median of the group's surviving rows: one lucky sample does not lower all others."""
    scores, present = outcome(token_rewards, mask), mask.any(dim=1)
    advantages = torch.zeros_like(scores)
    for group in group_id.unique():
        rows = (group_id == group) & present
        if rows.any():
            advantages[rows] = scores[rows] - scores[rows].quantile(0.5)
    result = spread_over_tokens(advantages, mask, like=token_rewards)
    return result, result


median_baseline.needs = frozenset()  # type: ignore[attr-defined]  # columns beyond those of every step
