"""A reward that now and then is slow or no number: once for each order that lies in a folder, else always the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

SLOW_S = 300.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, orders: str) -> float:
    if _taken(Path(orders) / "slow"):
        time.sleep(SLOW_S)
    if _taken(Path(orders) / "nan"):
        return float("nan")
    return sum(letter in ground_truth for letter in solution_str) / max(1, len(solution_str))


def _taken(order: Path) -> bool:
    """Whether the order was there; of several processes one takes it."""
    try:
        order.unlink()
    except FileNotFoundError:
        return False
    return True
