"""How far the sampler's log-probs are from the trainer's, as metrics of one step."""

from __future__ import annotations

from torch import Tensor

from hybridflow.batch.batch import Batch

Metrics = dict[str, float]

AGREEMENT_READS = ("response_mask", "rollout_log_probs?", "old_log_probs?", "old_entropy?")
"""Columns of ``sampler_agreement``."""


def sampler_agreement(batch: Batch) -> Metrics:
    """``training/rollout_log_prob_diff/*`` and ``actor/entropy_old``, over policy tokens of valid rows.

    The difference is |rollout - old| in nats, about 1e-6 in fp32 when the generator holds the actor's weights. Nothing
    where there are no old log-probs or no such token.
    """
    mask = batch["response_mask"] & batch["valid"][:, None]
    if not bool(mask.any()):
        return {}
    metrics: Metrics = {}
    if "old_log_probs" in batch:
        difference = (batch["rollout_log_probs"] - batch["old_log_probs"])[mask].abs()
        metrics["training/rollout_log_prob_diff/max"] = float(difference.max())
        metrics["training/rollout_log_prob_diff/mean"] = float(difference.mean())
    if "old_entropy" in batch:
        metrics["actor/entropy_old"] = _mean(batch["old_entropy"], mask)
    return metrics


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].mean())
