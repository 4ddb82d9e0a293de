"""A user's reward function that pays parts of a response where they end."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, Any]:
    """1 for the right answer, and 0.1 for every digit, at its place."""
    digits = [(end, 0.1) for end, sign in enumerate(solution_str, start=1) if sign.isdigit()]
    return {"score": float(solution_str == ground_truth), "digits": len(digits), "step_rewards": digits}
