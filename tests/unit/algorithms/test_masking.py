from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms import masking
from hybridflow.algorithms.masking import (
    Groups,
    keep,
    last_true,
    masked_mean,
    masked_moments,
    masked_sum,
    masked_whiten,
)

NAN, INF = float("nan"), float("inf")


def test_garbage_at_masked_positions_reaches_neither_value_nor_gradient() -> None:
    """A12: loss [[1, nan], [2, inf]] with mask [[1, 0], [1, 0]] has mean 1.5 and sum 3."""
    loss = torch.tensor([[1.0, NAN], [2.0, INF]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 0]]).bool()
    assert masked_mean(loss, mask).item() == 1.5
    assert masked_sum(loss, mask).item() == 3.0
    mean, variance = masked_moments(loss.detach(), mask)
    assert (mean.item(), variance.item()) == (1.5, 0.5)
    assert masked_whiten(loss.detach(), mask)[:, 1].tolist() == [0.0, 0.0]
    masked_mean(loss, mask).backward()
    assert loss.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]


def test_gradient_through_exp_of_a_huge_masked_log_ratio_is_zero() -> None:
    """A12: masking before the exponential, because 0 * inf in the backward pass is nan."""
    log_ratio = torch.tensor([0.1, 1e4], requires_grad=True)
    mask = torch.tensor([True, False])
    masked_sum(keep(log_ratio, mask).exp(), mask).backward()
    assert log_ratio.grad[1].item() == 0.0
    assert log_ratio.grad[0].item() == pytest.approx(math.exp(0.1), rel=1e-6)


def test_a_mask_that_is_not_boolean_is_refused() -> None:
    """A13: another column in the slot of the mask must not pass."""
    with pytest.raises(TypeError, match="mask"):
        keep(torch.ones(2), torch.tensor([0.5, -1.0]))


def test_nothing_selected_gives_zero_not_nan() -> None:
    """A11."""
    values, mask = torch.tensor([[NAN, 1.0]]), torch.zeros(1, 2, dtype=torch.bool)
    assert masked_mean(values, mask).item() == 0.0
    assert masked_mean(values, mask, dim=1).tolist() == [0.0]
    assert [float(x) for x in masked_moments(values, mask)] == [0.0, 0.0]
    assert masked_whiten(values, mask).tolist() == [[0.0, 0.0]]
    assert masked_whiten(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)


def test_whitening_uses_masked_statistics_and_unbiased_variance() -> None:
    """B05: masked mean 4 (not 1.5), unbiased variance 4, so [-1, 0] and [1]; padding 0."""
    values = torch.tensor([[2.0, 4, 0, 0], [6, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    mean, variance = masked_moments(values, mask)
    assert (mean.item(), variance.item()) == (4.0, 4.0)
    expected = torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]])
    torch.testing.assert_close(masked_whiten(values, mask), expected, atol=1e-6, rtol=0)
    kept_mean = masked_whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(kept_mean, torch.where(mask, expected + 4, 0.0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("number", [0.1, 0.35, 0.7, 1 / 3])
def test_whitening_of_equal_numbers_is_exactly_zero(number: float) -> None:
    """B02: in float64 the mean of such copies need not be the number itself."""
    for dtype in (torch.float32, torch.float64):
        values = torch.full((3, 7), number, dtype=dtype)
        assert masked_whiten(values, torch.ones(3, 7, dtype=torch.bool)).abs().max().item() == 0.0


def test_reductions_over_several_blocks_equal_those_over_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(9, 5, generator=generator) > 0.3
    whole = (*masked_moments(values, mask), masked_whiten(values, mask))
    monkeypatch.setattr(masking, "BLOCK_ELEMENTS", 10)
    for one, other in zip(whole, (*masked_moments(values, mask), masked_whiten(values, mask)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-14, rtol=0)


def test_moments_keep_their_digits_around_a_large_mean() -> None:
    values = torch.tensor([1e6 + 1.0, 1e6 + 2.0, 1e6 + 3.0])
    mean, variance = masked_moments(values, torch.ones(3, dtype=torch.bool))
    assert (mean.item(), variance.item()) == (1e6 + 2.0, 1.0)


def test_last_true_finds_the_last_selected_position_of_each_row() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    last, found = last_true(mask)
    assert last.tolist() == [2, 0, 0]
    assert found.tolist() == [True, False, True]
    assert last_true(torch.zeros(2, 0, dtype=torch.bool))[1].tolist() == [False, False]


def test_groups_go_by_id_and_count_present_rows_only() -> None:
    groups = Groups.of(torch.tensor([7, 3, 7, 3, 8]), torch.tensor([True, True, True, False, False]))
    values = torch.tensor([1.0, 5.0, 3.0, NAN, INF])
    assert groups.size.tolist() == [1, 2, 0]
    assert groups.mean(values).tolist() == [5.0, 2.0, 0.0]
    assert groups.has_spread(values).tolist() == [False, True, False]
    assert groups.centred(values).tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0]
    assert groups.std(values).tolist() == [0.0, math.sqrt(2.0), 0.0]


@pytest.mark.parametrize("score", [0.1, 0.35, 0.7, 0.95, 1 / 3])
def test_equal_scores_that_are_not_exact_in_binary_have_no_spread(score: float) -> None:
    """B02: seven float32 copies have a naive standard deviation of about 5e-8; here exactly 0."""
    values = torch.full((7,), score, dtype=torch.float32)
    groups = Groups.of(torch.zeros(7, dtype=torch.int64), torch.ones(7, dtype=torch.bool))
    assert not groups.has_spread(values).item()
    assert groups.centred(values).abs().max().item() == 0.0
    assert groups.std(values).item() == 0.0
