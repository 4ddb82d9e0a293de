"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): which groups teach something, and when to ask for more.

A group whose samples all have the same *raw* metric gives no gradient. It is dropped and further prompts are generated,
a bounded number of times, until the batch has its exact number of groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybridflow.algorithms.masking import Groups
from hybridflow.algorithms.rewards import reward_components
from hybridflow.config.algorithm import FilterGroupsConfig
from hybridflow.utils.errors import ConfigError

Outcome = Literal["full", "again", "train", "skip", "error"]
EXHAUSTED_ACTIONS: tuple[str, ...] = ("train", "skip", "error")


def raw_metric(
    *,
    name: str,
    score: Float[Tensor, " B"],
    reward_info: Sequence[Mapping[str, Any]],
    valid: Bool[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """What the filter judges: ``score`` or a number of ``reward_info``; nan where a row has none.

    Raises:
        ColumnError: no valid row has a number of that name.
    """
    if name == "score":
        return score.double()
    return reward_components(reward_info=reward_info, keys=(name,), scored=valid)[:, 0].to(score.device)


def telling_rows(
    *, metric: Float[Tensor, " B"], group_id: Int[Tensor, " B"], valid: Bool[Tensor, " B"]
) -> Bool[Tensor, " B"]:
    """Rows (valid or not) of groups in which two valid rows have different finite metrics."""
    present = valid & metric.isfinite()
    groups = Groups.of(group_id, present)
    return groups.has_spread(torch.where(present, metric.double(), 0.0))[groups.index]


def first_groups(*, group_id: Int[Tensor, " B"], keep_rows: Bool[Tensor, " B"], wanted: int) -> Bool[Tensor, " B"]:
    """Rows of the first ``wanted`` groups among ``keep_rows``, in order of their first appearance."""
    chosen: dict[int, None] = {}
    for group in group_id[keep_rows].tolist():
        if len(chosen) < wanted:
            chosen.setdefault(group, None)
    return keep_rows & torch.isin(group_id, torch.tensor(list(chosen), dtype=group_id.dtype, device=group_id.device))


def count_groups(*, group_id: Int[Tensor, " B"], keep_rows: Bool[Tensor, " B"]) -> int:
    """Number of groups among ``keep_rows``."""
    return len(torch.unique(group_id[keep_rows]))


def next_move(*, found: int, wanted: int, rounds: int, config: FilterGroupsConfig) -> Outcome:
    """What follows after ``rounds`` generation rounds gave ``found`` telling groups of ``wanted``.

    ``full``: the batch is complete. ``again``: generate once more. Otherwise the rounds are used up and the option
    ``on_exhausted`` decides: ``train`` on what there is (with nothing at all: ``skip``), ``skip`` the step, or
    ``error``.

    Raises:
        ConfigError: rounds are not bounded, or ``on_exhausted`` is unknown.
    """
    limit = config.max_num_gen_batches
    if limit < 1 or not math.isfinite(limit):
        raise ConfigError(f"algorithm.filter_groups.max_num_gen_batches={limit} must be at least 1: rounds are bounded")
    if found >= wanted:
        return "full"
    if rounds < limit:
        return "again"
    if config.on_exhausted == "train":
        return "train" if found else "skip"
    if config.on_exhausted == "skip":
        return "skip"
    if config.on_exhausted == "error":
        return "error"
    raise ConfigError(
        f"algorithm.filter_groups.on_exhausted={config.on_exhausted!r}: use one of {', '.join(EXHAUSTED_ACTIONS)}"
    )
