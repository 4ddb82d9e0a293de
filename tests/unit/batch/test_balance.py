"""Balance: definition (a partition, nearly equal), known cases, determinism."""

from __future__ import annotations

import random

import pytest

from hybridflow.batch.balance import balance, count_batches, micro_batches, row_cost


def flat(groups: list[list[int]]) -> list[int]:
    return sorted(i for group in groups for i in group)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("count", "parts"), [(0, 3), (1, 3), (7, 3), (64, 8), (65, 8)])
def test_every_row_is_in_exactly_one_group(count: int, parts: int, equal: bool) -> None:
    costs = [random.Random(0).randint(1, 500) for _ in range(count)]
    groups = balance(costs, parts, equal)
    assert len(groups) == parts
    assert flat(groups) == list(range(count))


def test_equal_counts_give_each_rank_one_long_row() -> None:
    groups = balance([10, 1, 1, 1, 1, 1, 1, 10], 2, equal_counts=True)
    assert [len(group) for group in groups] == [4, 4]
    assert [sum(i in (0, 7) for i in group) for group in groups] == [1, 1]


@pytest.mark.parametrize("count", [5, 8, 13])
def test_equal_counts_differ_by_at_most_one(count: int) -> None:
    sizes = [len(group) for group in balance(list(range(count)), 4, equal_counts=True)]
    assert max(sizes) - min(sizes) <= 1


def test_the_textbook_case_of_differencing() -> None:
    costs = [8, 7, 6, 5, 4]
    sums = sorted(sum(costs[i] for i in group) for group in balance(costs, 2))
    assert sums == [14, 16]


def test_skewed_lengths_balance_within_one_percent() -> None:
    draw = random.Random(1)
    costs = [row_cost(min(4096, int(draw.lognormvariate(6, 0.8)))) for _ in range(1024)]
    for equal in (False, True):
        sums = [sum(costs[i] for i in group) for group in balance(costs, 16, equal)]
        assert max(sums) / (sum(sums) / 16) < 1.01


def test_ties_are_broken_the_same_way_every_time() -> None:
    assert balance([1] * 9, 4) == balance([1] * 9, 4)
    assert balance([3, 3, 3, 3], 2, True) == balance([3, 3, 3, 3], 2, True)


def test_cost_grows_faster_than_length_when_attention_dominates() -> None:
    assert row_cost(2000, hidden=8) > 3.5 * row_cost(1000, hidden=8)
    assert row_cost(20, hidden=4096) == pytest.approx(2 * row_cost(10, hidden=4096), rel=0.01)


def test_micro_batches_keep_the_budget() -> None:
    draw = random.Random(2)
    tokens = [draw.randint(1, 90) for _ in range(200)]
    groups = micro_batches(tokens, 100)
    assert flat(groups) == list(range(200))
    assert all(sum(tokens[i] for i in group) <= 100 for group in groups)


def test_a_row_longer_than_the_budget_stands_alone() -> None:
    groups = micro_batches([3, 50, 4, 2], 10)
    assert [1] in groups
    assert flat(groups) == [0, 1, 2, 3]


def test_more_micro_batches_on_request_but_never_more_than_rows() -> None:
    assert len(micro_batches([1, 1, 1, 1], 100, at_least=3)) == 3
    assert len(micro_batches([1, 1], 100, at_least=3)) == 2


def test_rows_by_count_are_consecutive_and_even() -> None:
    assert count_batches(5, 2) == [[0, 1], [2, 3], [4]]
    assert count_batches(4, 3) == [[0, 1], [2, 3]]
    assert count_batches(0, 3) == []
    assert [len(part) for part in count_batches(4, 4, at_least=3)] == [2, 1, 1]


def test_empty_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        micro_batches([1], 0)
    with pytest.raises(ValueError, match="holds nothing"):
        count_batches(1, 0)
    with pytest.raises(ValueError, match="0 parts"):
        balance([1], 0)
