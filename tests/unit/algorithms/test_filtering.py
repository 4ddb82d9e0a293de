from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.filtering import (
    EXHAUSTED_ACTIONS,
    count_groups,
    first_groups,
    next_move,
    raw_metric,
    telling_rows,
)
from hybridflow.config import choices
from hybridflow.config.algorithm import FilterGroupsConfig
from hybridflow.utils.errors import ConfigError
from tests.unit.algorithms.cases import unchecked


def telling(metric: list[float], groups: list[int], valid: list[bool] | None = None) -> list[bool]:
    return telling_rows(
        metric=torch.tensor(metric, dtype=torch.float64),
        group_id=torch.tensor(groups),
        valid=torch.tensor(valid or [True] * len(metric)),
    ).tolist()


def test_groups_without_spread_are_dropped_wherever_their_rows_stand() -> None:
    assert telling([1, 0, 1, 1, 0.5, 0.5], [3, 1, 1, 3, 2, 2]) == [False, True, True, False, False, False]


def test_equal_scores_that_are_not_exact_in_binary_do_not_pass() -> None:
    """B02."""
    assert telling([0.7] * 7, [0] * 7) == [False] * 7


def test_failed_samples_make_no_spread() -> None:
    """B15: nan is not a difference, and an invalid row is not one either; its group keeps it when the others differ."""
    assert telling([1, float("nan")], [0, 0]) == [False, False]
    assert telling([1, 0], [0, 0], [True, False]) == [False, False]
    assert telling([1, 0, 9], [0, 0, 0], [True, True, False]) == [True, True, True]


def test_the_metric_is_the_raw_one() -> None:
    """B18: shaping that differs inside a group of equal correctness is not what is judged."""
    score, info = torch.tensor([1.0, 0.5]), [{"acc": 1.0}, {"acc": 1.0}]
    valid = torch.ones(2, dtype=torch.bool)
    assert raw_metric(name="score", score=score, reward_info=info, valid=valid).tolist() == [1.0, 0.5]
    assert raw_metric(name="acc", score=score, reward_info=info, valid=valid).tolist() == [1.0, 1.0]


def test_the_batch_is_topped_up_to_its_exact_number_of_groups() -> None:
    """B18: the first wanted groups in order of appearance, whole groups only."""
    groups = torch.tensor([7, 3, 7, 5, 3, 9])
    keep = torch.tensor([True, True, True, False, True, True])
    assert first_groups(group_id=groups, keep_rows=keep, wanted=2).tolist() == [True, True, True, False, True, False]
    assert count_groups(group_id=groups, keep_rows=keep) == 3
    assert count_groups(group_id=groups, keep_rows=torch.zeros(6, dtype=torch.bool)) == 0


@pytest.mark.parametrize(
    ("found", "rounds", "on_exhausted", "move"),
    [
        (4, 1, "train", "full"),
        (5, 3, "error", "full"),
        (3, 1, "train", "again"),
        (0, 2, "error", "again"),
        (3, 3, "train", "train"),
        (0, 3, "train", "skip"),
        (3, 3, "skip", "skip"),
        (3, 3, "error", "error"),
    ],
)
def test_rounds_are_bounded_and_have_a_named_outcome(found: int, rounds: int, on_exhausted: str, move: str) -> None:
    """B18."""
    config = FilterGroupsConfig(enable=True, max_num_gen_batches=3, on_exhausted=on_exhausted)
    assert next_move(found=found, wanted=4, rounds=rounds, config=config) == move


def test_unbounded_rounds_and_unknown_outcomes_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_gen_batches"):
        next_move(found=0, wanted=1, rounds=1, config=unchecked(FilterGroupsConfig(), max_num_gen_batches=0))
    with pytest.raises(ConfigError, match="train, skip, error"):
        next_move(found=0, wanted=1, rounds=10, config=unchecked(FilterGroupsConfig(), on_exhausted="stop"))
    assert EXHAUSTED_ACTIONS == choices.EXHAUSTED_ACTIONS
