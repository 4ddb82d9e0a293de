"""The reward of the comparison: the share of digits in a response. Cheap, varied, and the same for every contestant."""

from __future__ import annotations


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
