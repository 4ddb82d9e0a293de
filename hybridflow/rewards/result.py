"""What scoring gives: a ``Result`` per sample, and what a reward function may return."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.utils.errors import HybridFlowError

OWN = "function"
"""Component: the score of the reward function itself, where components are weighed."""
STEP_REWARDS = "step_rewards"
"""Entry of a reward function's dict: rewards of parts of the response, by where they end."""


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


def with_own_score(result: Result) -> Result:
    """``result`` with the score of its function noted as the component ``function``."""
    return replace(result, info={**result.info, OWN: result.score}) if result.valid else result


def weighed(result: Result, weights: Mapping[str, float]) -> Result:
    """``result`` with the weighted sum of the named components as its score; invalid where one is no finite number."""
    if not result.valid:
        return result
    terms = []
    for name, weight in weights.items():
        part = result.info.get(name)
        if not isinstance(part, (int, float)) or not math.isfinite(part):
            known = ", ".join(name for name, value in result.info.items() if isinstance(value, (int, float)))
            return failed(f"no component {name!r} (reward.component_weights) among {known or 'no numbers'}")
        terms.append(weight * part)
    return replace(result, score=math.fsum(terms))


def as_score(returned: Any) -> tuple[float, dict[str, Any]]:
    """Score and further entries of what a reward function returned: a number, or a dict with ``score``.

    A number is an int, float, bool, numpy scalar, or an array or tensor of one element. 0.0 is a score like any other.
    ``step_rewards``, where there is one, becomes a tuple of (characters, reward) pairs.

    Raises:
        TypeError: anything else; says what came.
        ValueError: the score is not finite.
    """
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise TypeError(f"a dict without 'score' (it has {', '.join(map(str, returned)) or 'nothing'})")
        extra = {str(key): _plain(value) for key, value in returned.items() if key != "score"}
        if STEP_REWARDS in extra:
            extra[STEP_REWARDS] = _steps(extra[STEP_REWARDS])
        return _number(returned["score"]), extra
    return _number(returned), {}


def _steps(value: Any) -> tuple[tuple[int, float], ...]:
    wanted = f"{STEP_REWARDS} {str(value)[:80]!r}, where a list of (characters, reward) pairs is expected"
    if not isinstance(value, (list, tuple)) or any(not isinstance(p, (list, tuple)) or len(p) != 2 for p in value):
        raise TypeError(wanted)
    places = [_plain(place) for place, _ in value]
    if any(not isinstance(place, numbers.Integral) for place in places):
        raise TypeError(wanted)
    return tuple((int(place), _number(reward)) for place, (_, reward) in zip(places, value, strict=True))


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
