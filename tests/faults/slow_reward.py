"""A reward that takes longer than a test waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

SECONDS = 120.0


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, marker: str = ""
) -> float:
    """Says by the file ``marker`` that it was called."""
    if marker:
        Path(marker).touch()
    time.sleep(SECONDS)
    return 0.0
