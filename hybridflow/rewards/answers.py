"""Scorers that compare the answer in a response with the ground truth by rules; cheap enough to run anywhere.

An answer or a ground truth that is empty never counts as equal to anything: without a ground truth the sample fails
(ValueError), without an answer it scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

_MARKER = re.compile(r"####\s*([^\s#][^\n#]*)")
_NUMBER = re.compile(r"[-+]?\s*[$€£]?\s*[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_DRESSING = str.maketrans("", "", "$€£,% ")


def exact_match(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1 when the whole response, without outer blanks, is the ground truth (or one of a list of them), else 0."""
    return float(any(_same(solution_str.strip(), truth) for truth in accepted(ground_truth)))


def marked_number(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1 when the first number after the *last* ``####`` of the response is the ground truth, else 0 (GSM8K's rule).

    Signs, currency signs, thousands commas and trailing zeros do not matter, nor does text that follows. A ground truth
    may be GSM8K's whole solution with its own marker.
    """
    markers = _MARKER.findall(solution_str)
    found = _NUMBER.search(markers[-1]) if markers else None
    if found is None:
        _ = accepted(ground_truth)
        return 0.0
    truths = [_MARKER.findall(truth)[-1] if _MARKER.search(truth) else truth for truth in accepted(ground_truth)]
    return float(any(_same(found.group(), truth) for truth in truths))


def accepted(ground_truth: Any) -> list[str]:
    """The ground truths that count, as text: one, or each of a list.

    Raises:
        ValueError: when there is none.
    """
    values = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    truths = [str(value).strip() for value in values if value is not None]
    if not any(truths):
        raise ValueError(f"the ground truth {ground_truth!r} is empty: bad data")
    return [truth for truth in truths if truth]


def _same(answer: str, truth: str) -> bool:
    if not answer:
        return False
    if answer == truth:
        return True
    given, wanted = _as_number(answer), _as_number(truth)
    return given is not None and given == wanted


def _as_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.translate(_DRESSING).rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
