from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.aggregation import AGGREGATIONS, counts_of
from hybridflow.config.choices import LOSS_AGG_MODES
from tests.unit.algorithms.cases import case, lists

ROWS = torch.tensor([[4.0, 99.0, 99.0], [1.0, 1.0, 1.0]])
ROWS_MASK = torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()


def test_the_registry_holds_exactly_the_allowed_names() -> None:
    assert tuple(AGGREGATIONS) == LOSS_AGG_MODES


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 1.75),
        ("seq-mean-token-sum", 3.5),
        ("seq-mean-token-mean", 2.5),
        ("token-sum", 7.0),
        ("seq-mean-token-sum-norm", 0.35),
    ],
)
def test_each_mode_has_its_own_value(mode: str, value: float) -> None:
    """A01 (1.75), A03 (3.5, 2.5, 1.75 are three different numbers)."""
    share = AGGREGATIONS[mode](losses=ROWS, mask=ROWS_MASK, counts=counts_of(ROWS_MASK), scale=10.0)
    assert share.item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_parts_of_a_mini_batch_add_up_to_the_whole(mode: str) -> None:
    """A01, A02: rows of length 4 and 1 cut into micro-batches of one row (buggy token-mean: 2.5)."""
    counts = counts_of(ROWS_MASK)
    whole = AGGREGATIONS[mode](losses=ROWS, mask=ROWS_MASK, counts=counts, scale=10.0)
    parts = [
        AGGREGATIONS[mode](losses=ROWS[i : i + 1], mask=ROWS_MASK[i : i + 1], counts=counts, scale=10.0)
        for i in range(2)
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)


def test_tool_tokens_do_not_count() -> None:
    """A08: 3 policy tokens of loss 1 beside 5 tool tokens have token-mean 1.0 (buggy 0.375)."""
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 1]]).bool()
    losses = torch.where(mask, 1.0, 7.0)
    assert AGGREGATIONS["token-mean"](losses=losses, mask=mask, counts=counts_of(mask), scale=1.0).item() == 1.0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_all_masked_batch_gives_zero_and_zero_gradient(mode: str) -> None:
    """A11."""
    losses = torch.tensor([[float("nan"), 1.0]], requires_grad=True)
    mask = torch.zeros(1, 2, dtype=torch.bool)
    share = AGGREGATIONS[mode](losses=losses, mask=mask, counts=counts_of(mask), scale=5.0)
    share.backward()
    assert share.item() == 0.0
    assert losses.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_values_equal_plain_loops_and_gradients_pass_gradcheck(mode: str) -> None:
    work = case()
    losses = work.advantages.clone().requires_grad_()
    counts = counts_of(work.mask)

    def share(x: torch.Tensor) -> torch.Tensor:
        return AGGREGATIONS[mode](losses=x, mask=work.mask, counts=counts, scale=7.0)

    rows = [row for row in lists(work.advantages, work.mask) if row]
    tokens = sum(len(row) for row in rows)
    expected = {
        "token-mean": sum(sum(row) for row in rows) / tokens,
        "token-sum": sum(sum(row) for row in rows),
        "seq-mean-token-sum": sum(sum(row) for row in rows) / len(rows),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": sum(sum(row) / 7.0 for row in rows) / len(rows),
    }[mode]
    assert share(losses).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(share, (losses,))


def test_counts_hold_tokens_sequences_and_rows() -> None:
    counts = counts_of(case().mask)
    assert (counts.tokens, counts.sequences, counts.rows) == (23, 7, 8)
