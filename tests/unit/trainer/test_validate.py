"""Best-of-k is unbiased, and every held-out prompt counts exactly once."""

from __future__ import annotations

import itertools

import pytest

from hybridflow.trainer.validate import pass_at_k


@pytest.mark.parametrize(("k", "expected"), [(1, 0.25), (2, 0.5), (4, 1.0)])
def test_pass_at_k_of_one_right_answer_in_four(k, expected):
    assert pass_at_k(4, 1, k) == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_pass_at_k_equals_the_share_of_all_subsets_with_a_right_answer(n):
    for right in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([i < right for i in range(n)], k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
