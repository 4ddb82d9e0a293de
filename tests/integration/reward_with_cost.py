"""A user's reward function that names a cost, for Safe-RLHF: answers with a 1 in them are forbidden (cost 1)."""

from __future__ import annotations


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object, price: float = 1.0
) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth), "cost": price * float("1" in solution_str)}
