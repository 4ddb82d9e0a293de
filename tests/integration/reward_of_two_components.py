"""A user's reward function with two components, for GDPO."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    exact, short = float(solution_str == ground_truth), float(len(solution_str) <= 3)
    return {"score": exact + 0.5 * short, "exact": exact, "short": short}
