"""What a finished batch says about itself, from its columns of one number a row."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from hybridflow.batch.batch import Batch


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Token counts of one step's batch. Reads nothing that is kept elsewhere."""
    lengths = (batch["prompt_length"] + batch["response_length"]).double()
    return {"perf/total_num_tokens": float(lengths.sum()), "perf/valid_share": float(batch["valid"].double().mean())}


def reward_parts(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means of the finite numbers that a reward function returned beside ``score``, each over the rows that have it."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                found[name].append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
