"""Scorers by data source, and the user's own reward function.

A scorer takes (solution_str, ground_truth, extra_info) and gives a number or a dict with ``score``. To add one, write
it in a module of this package and add a line to ``SCORERS``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load, load_from_file

RewardFunction = Callable[..., Any]
"""``f(data_source=, solution_str=, ground_truth=, extra_info=)``, sync or async."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """One built-in scorer."""

    target: str
    """Where it is, as ``module:name``."""
    in_process: bool = False
    """Whether it is cheap and bounded, so that it needs no process of its own and no deadline."""


_EXACT = Scorer("hybridflow.rewards.answers:exact_match", in_process=True)
_MARKED = Scorer("hybridflow.rewards.answers:marked_number", in_process=True)
_SYMBOLIC = Scorer("hybridflow.rewards.mathematics:symbolic_match")
_VERIFIED = Scorer("hybridflow.rewards.reasoning:verified_answer")

SCORERS: dict[str, Scorer] = {
    "hybridflow/arithmetic": _EXACT,
    "openai/gsm8k": _MARKED,
    "gsm8k": _MARKED,
    "lighteval/MATH": _SYMBOLIC,
    "DigitalLearningGmbH/MATH-lighteval": _SYMBOLIC,
    "HuggingFaceH4/MATH-500": _SYMBOLIC,
    "math": _SYMBOLIC,
    "math_dapo": _SYMBOLIC,
    "math_verify": _SYMBOLIC,
    "exact_match": _EXACT,
    "reasoning_gym/*": _VERIFIED,
}
"""By ``data_source``; ``name/*`` stands for everything under it."""


def find_scorer(data_source: str) -> Scorer:
    """The built-in scorer of a data source.

    Raises:
        ConfigError: there is none; lists what there is.
    """
    found = SCORERS.get(data_source) or SCORERS.get(f"{data_source.partition('/')[0]}/*")
    if found is None:
        raise ConfigError(
            f"no built-in scorer for data_source {data_source!r}: there are {', '.join(sorted(SCORERS))}; for your own "
            "set reward.custom_reward_function.path"
        )
    return found


def load_reward_function(config: RewardConfig) -> RewardFunction:
    """What scores a sample under ``config``: the user's function with its extra arguments, or the built-in scorers.

    A plain function, ``async def``, ``functools.partial`` and an instance with ``__call__`` all do.

    Raises:
        ConfigError: the file, or the name in it, does not exist or cannot be called.
    """
    own = config.custom_reward_function
    if own.path is None:
        return score_by_data_source
    function = load_from_file(own.path, own.name)
    if not callable(function):
        raise ConfigError(f"reward.custom_reward_function: {own.name!r} in {own.path!r} cannot be called")
    return functools.partial(function, **own.reward_kwargs) if own.reward_kwargs else function


def score_by_data_source(
    *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> Any:
    """What the built-in scorer of ``data_source`` gives."""
    return load(find_scorer(data_source).target)(solution_str, ground_truth, extra_info)


def is_async(function: RewardFunction) -> bool:
    """Whether a call gives something to be awaited, as far as can be told without calling."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
