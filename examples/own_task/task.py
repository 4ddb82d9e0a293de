"""A task of your own in one file: where prompts come from, and what a response is worth.

``read_prompts`` stands in for data files (``data.custom_cls``), ``compute_score`` is the reward function
(``reward.custom_reward_function``). Either works without the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.config.data import DataConfig


def read_prompts(source: str, *, config: DataConfig, held_out: bool) -> Iterator[dict[str, Any]]:
    """Sums of two numbers below ``source`` ("20"); every fifth is held out for validation."""
    limit = int(source)
    for number in range(limit * limit):
        first, second = divmod(number, limit)
        if (number % 5 == 0) == held_out:
            yield {
                "prompt": f"{first}+{second}=",
                "data_source": "own/sums",
                "ground_truth": str(first + second),
                "extra_info": {"digits": len(str(first + second))},
            }


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """1 for the right sum, 0.2 for a wrong one of the right length; the second entry becomes a metric."""
    right = solution_str == ground_truth
    length = solution_str.isdigit() and len(solution_str) == extra_info["digits"]
    return {"score": 1.0 if right else 0.2 * length, "right_length": float(length)}
