"""Prompts of ``reasoning-gym``'s procedural tasks; the data side's one home of that package."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from hybridflow.utils.errors import DataError

SOURCE_PREFIX = "reasoning_gym/"
"""``data_source`` of a row is this and the task's name; ``rewards`` knows the same prefix."""


def question_stream(task: str, parameters: Mapping[str, str], *, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """``size`` draws of ``task`` in the columns of a data file; draw i depends on ``seed + i`` alone.

    ``parameters`` are fields of the task's own configuration, as text, beside ``instruction`` (a sentence put after the
    question) and ``system`` (a system message).

    Raises:
        DataError: unknown task or parameter, or a value that the task refuses.
    """
    if task not in DATASETS:
        raise DataError(f"reasoning_gym:{task}: no such task; there are {', '.join(sorted(DATASETS))}")
    own = dict(parameters)
    instruction, system = own.pop("instruction", ""), own.pop("system", "")
    config_class = DATASETS[task][1]
    allowed = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
    for name in own:
        if name not in allowed:
            names = ", ".join(sorted(allowed | {"instruction", "system", "seed", "size"}))
            raise DataError(f"reasoning_gym:{task}: no parameter {name!r}; it takes {names}")
    defaults = config_class()
    values = {name: _as_type_of(vars(defaults)[name], text, f"{task}?{name}") for name, text in own.items()}
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **values)
    except (AssertionError, ValueError, TypeError) as error:
        raise DataError(f"reasoning_gym:{task} refuses its parameters: {error}") from error
    for i in range(size):
        yield _as_row(task, dataset[i], instruction, system)


def _as_row(task: str, entry: Mapping[str, Any], instruction: str, system: str) -> dict[str, Any]:
    question = f"{entry['question']}\n{instruction}" if instruction else entry["question"]
    chat = [{"role": "system", "content": system}] if system else []
    return {
        "prompt": [*chat, {"role": "user", "content": question}],
        "data_source": SOURCE_PREFIX + task,
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"entry": dict(entry)},
    }


def _as_type_of(default: Any, text: str, where: str) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise DataError(f"reasoning_gym:{where}={text}: true or false is expected")
        return text.lower() == "true"
    if isinstance(default, tuple | list):
        return [_scalar(item) for item in text.split("|")]
    if isinstance(default, str):
        return text
    value = _scalar(text)
    if isinstance(value, str) and default is not None:
        raise DataError(f"reasoning_gym:{where}={text}: a number is expected, as in the default {default}")
    return value


def _scalar(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
