"""What scoring gives: a ``Result`` per sample, and what a reward function may return."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.utils.errors import HybridFlowError


class RewardError(HybridFlowError, RuntimeError):
    """Scoring cannot go on: a reward function returned something that is no score, or too many samples failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The score of one sample, or why there is none."""

    score: float
    """NaN when the sample is invalid: a failure is never a score."""
    valid: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the dict that the reward function returned."""
    cause: str | None = None
    """Why the sample is invalid: ``raised ValueError: ...`` or ``no answer in 30 s``."""


def failed(cause: str) -> Result:
    """An invalid result."""
    return Result(score=math.nan, valid=False, cause=cause)


def with_model(result: Result, score: float) -> Result:
    """``result`` of a function with the score of a reward model added, which is also noted by itself."""
    if not math.isfinite(score):
        return failed(f"the reward model's score is {score}")
    if not result.valid:
        return result
    return Result(score=result.score + score, info={**result.info, "reward_model": score})


def as_score(returned: Any) -> tuple[float, dict[str, Any]]:
    """Score and further entries of what a reward function returned: a number, or a dict with ``score``.

    A number is an int, float, bool, numpy scalar, or an array or tensor of one element. 0.0 is a score like any other.

    Raises:
        TypeError: anything else; says what came.
        ValueError: the score is not finite.
    """
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise TypeError(f"a dict without 'score' (it has {', '.join(map(str, returned)) or 'nothing'})")
        extra = {str(key): _plain(value) for key, value in returned.items() if key != "score"}
        return _number(returned["score"]), extra
    return _number(returned), {}


def _number(value: Any) -> float:
    value = _plain(value)
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{type(value).__name__} {str(value)[:80]!r}")
    try:
        score = float(value)
    except OverflowError:  # an integer or a fraction beyond what a float holds
        score = -math.inf if value < 0 else math.inf
    if not math.isfinite(score):
        raise ValueError(f"the score {score} is not finite")
    return score


def _plain(value: Any) -> Any:
    """Python's own number for a foreign scalar (numpy, torch, jax: anything of one element with ``item``)."""
    if hasattr(value, "item") and hasattr(value, "shape") and math.prod(value.shape) == 1:
        return value.item()
    return value
