"""What a finished batch says about itself: tokens, and how far the sampler's log-probs are from the trainer's."""

from __future__ import annotations

import torch

from hybridflow.batch.batch import Batch


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Token counts and sampler/trainer agreement of one step's batch.

    ``training/rollout_log_prob_diff/*``: |rollout - old| in nats over policy tokens of valid rows; about 1e-6 in fp32
    when the generator holds the actor's weights.
    """
    lengths = (batch["prompt_length"] + batch["response_length"]).double()
    metrics = {"perf/total_num_tokens": float(lengths.sum()), "perf/valid_share": float(batch["valid"].double().mean())}
    mask = batch["response_mask"] & batch["valid"][:, None]
    if "old_log_probs" in batch and bool(mask.any()):
        difference = (batch["rollout_log_probs"] - batch["old_log_probs"])[mask].abs()
        metrics["training/rollout_log_prob_diff/max"] = float(difference.max())
        metrics["training/rollout_log_prob_diff/mean"] = float(difference.mean())
    if "old_entropy" in batch and bool(mask.any()):
        metrics["actor/entropy_old"] = float(torch.masked_select(batch["old_entropy"], mask).mean())
    return metrics
