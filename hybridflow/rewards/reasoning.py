"""Scorer of ``reasoning-gym`` tasks by each task's own verifier; the reward side's one home of that package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

_NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")
"""A minus right after a digit subtracts; elsewhere it is a sign."""


def verified_answer(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """What the task's verifier gives for the answer, in 0..1.

    The answer is what stands in the last ``<answer>...</answer>``; without one, the last number of the response if the
    task's own answer is a number, else the whole response without outer blanks.

    Raises:
        ValueError: when the row does not carry its ``entry``, which the verifier needs.
    """
    entry = (extra_info or {}).get("entry")
    if not isinstance(entry, Mapping):
        raise ValueError(
            "extra_info has no 'entry' (question, answer, metadata): rows of reasoning_gym:<task> carry it"
        )
    task = _task(entry["metadata"]["source_dataset"])
    return float(task.score_answer(_answer(solution_str, str(entry["answer"])), dict(entry)))


def _answer(response: str, truth: str) -> str:
    tagged = extract_answer(response)
    if tagged is not None:
        return tagged
    if _NUMBER.fullmatch(truth.strip()):
        numbers = _NUMBER.findall(response)
        return numbers[-1].replace(",", "") if numbers else ""
    return response.strip()


@cache
def _task(name: str) -> ProceduralDataset:
    dataset_class, config_class = DATASETS[name]
    return dataset_class(config=config_class())
