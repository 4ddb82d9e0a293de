"""What a finished batch says about itself, from its columns of one number a row."""

from __future__ import annotations

from hybridflow.batch.batch import Batch


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Token counts of one step's batch. Reads nothing that is kept elsewhere."""
    lengths = (batch["prompt_length"] + batch["response_length"]).double()
    return {"perf/total_num_tokens": float(lengths.sum()), "perf/valid_share": float(batch["valid"].double().mean())}
