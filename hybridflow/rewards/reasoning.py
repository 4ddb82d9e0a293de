"""Scorer of ``reasoning-gym`` tasks by each task's own verifier; the reward side's one home of that package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer


def verified_answer(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """What the task's verifier gives for the answer, in 0..1.

    The answer is what stands in the last ``<answer>...</answer>``, or the whole response without outer blanks.

    Raises:
        ValueError: when the row does not carry its ``entry``, which the verifier needs.
    """
    entry = (extra_info or {}).get("entry")
    if not isinstance(entry, Mapping):
        raise ValueError(
            "extra_info has no 'entry' (question, answer, metadata): rows of reasoning_gym:<task> carry it"
        )
    answer = extract_answer(solution_str)
    task = _task(entry["metadata"]["source_dataset"])
    return float(task.score_answer(solution_str.strip() if answer is None else answer, dict(entry)))


@cache
def _task(name: str) -> ProceduralDataset:
    dataset_class, config_class = DATASETS[name]
    return dataset_class(config=config_class())


__version__ = reasoning_gym.__version__
