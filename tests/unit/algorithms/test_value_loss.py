from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.aggregation import AGGREGATIONS, counts_of
from hybridflow.algorithms.value_loss import clipped_value_loss
from hybridflow.config.choices import LOSS_AGG_MODES
from tests.unit.algorithms.cases import case


def test_the_hand_computed_case_keeps_its_half() -> None:
    """A05: vpred [1, 0], returns [0, 1], old [.5, .5], clip .2: loss .5."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    losses, clipped = clipped_value_loss(
        values=torch.tensor([[1.0, 0.0]]),
        old_values=torch.tensor([[0.5, 0.5]]),
        returns=torch.tensor([[0.0, 1.0]]),
        mask=mask,
        cliprange=0.2,
    )
    share = AGGREGATIONS["token-mean"](losses=losses, mask=mask, counts=counts_of(mask), scale=1.0)
    assert share.item() == 0.5
    assert clipped.tolist() == [[False, False]]


def test_a_value_that_moved_beyond_the_clip_loses_its_gradient() -> None:
    """Moving from 0 to 1 toward a return of 1 with clip .2: the clipped error (.8^2) decides and is constant."""
    values = torch.tensor([[1.0]], requires_grad=True)
    losses, clipped = clipped_value_loss(
        values=values,
        old_values=torch.zeros(1, 1),
        returns=torch.ones(1, 1),
        mask=torch.ones(1, 1, dtype=torch.bool),
        cliprange=0.2,
    )
    losses.sum().backward()
    assert losses.item() == pytest.approx(0.32)
    assert clipped.item()
    assert values.grad.item() == 0.0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_values_equal_plain_loops_and_gradients_pass_gradcheck(mode: str) -> None:
    """A05: every aggregation is honoured."""
    work = case()
    old, returns, counts = work.values, work.rewards, counts_of(work.mask)
    values = (work.values + work.advantages).requires_grad_()

    def share(x: torch.Tensor) -> torch.Tensor:
        losses, _ = clipped_value_loss(values=x, old_values=old, returns=returns, mask=work.mask, cliprange=0.5)
        return AGGREGATIONS[mode](losses=losses, mask=work.mask, counts=counts, scale=3.0)

    total, per_row, rows, numbers = 0.0, 0.0, 0, values.tolist()
    for i in range(len(values)):
        terms = []
        for t in range(values.shape[1]):
            if work.mask[i, t]:
                v, o, r = numbers[i][t], float(old[i, t]), float(returns[i, t])
                moved = min(max(v, o - 0.5), o + 0.5)
                terms.append(0.5 * max((v - r) ** 2, (moved - r) ** 2))
        total += sum(terms)
        per_row += sum(terms) / len(terms) if terms else 0.0
        rows += bool(terms)
    expected = {
        "token-mean": total / counts.tokens,
        "token-sum": total,
        "seq-mean-token-sum": total / rows,
        "seq-mean-token-mean": per_row / rows,
        "seq-mean-token-sum-norm": total / rows / 3.0,
    }[mode]
    assert share(values).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(share, (values,))


def test_garbage_at_masked_positions_changes_nothing() -> None:
    """A12."""
    clean, dirty = case(), case().poisoned()
    results = [
        clipped_value_loss(values=w.values, old_values=w.advantages, returns=w.rewards, mask=w.mask, cliprange=0.5)[0]
        for w in (clean, dirty)
    ]
    assert torch.equal(*results)
