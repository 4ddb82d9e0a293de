"""Scorer of mathematical answers by symbolic equality; the one home of math-verify.

Its own time limits are off: they need SIGALRM, which exists in main threads only. The runner's deadline, which ends the
whole process, holds instead; so this scorer never runs inside a worker's own process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import math_verify

from hybridflow.rewards.answers import accepted

# math-verify warns on each first call that its limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def symbolic_match(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    r"""1 when the response's last answer (``\boxed{...}`` first, else an expression) equals the ground truth, else 0.

    Raises:
        ValueError: when no ground truth can be read.
    """
    readings = [_read(f"\\boxed{{{truth}}}" if "\\boxed" not in truth else truth) for truth in accepted(ground_truth)]
    readable = [reading for reading in readings if reading]
    if not readable:
        raise ValueError(f"the ground truth {ground_truth!r} cannot be read: bad data")
    answer = _read(solution_str)
    if not answer:
        return 0.0
    return float(any(math_verify.verify(truth, answer, timeout_seconds=None) for truth in readable))


def _read(text: str) -> list[Any]:
    # math-verify reads neighbouring boxes as one tuple; the last one is the answer here.
    last = max(text.rfind("\\boxed"), 0)
    # None switches its timer off, which needs the main thread; its annotation knows only numbers.
    return math_verify.parse(text[last:], parsing_timeout=cast("int", None))
