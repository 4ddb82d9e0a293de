from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.advantages import ADVANTAGES
from hybridflow.algorithms.token_baseline import gradient_energy, policy_slots, turn_slots
from tests.unit.algorithms.cases import Case, algorithm, case, lists, padded


def squares_of(work: Case) -> torch.Tensor:
    """Some sum of squared probabilities, at least that of the sampled token."""
    return work.old_log_probs.exp().square() + 0.01


def slot_of(row: list[int], t: int, *, by_turn: bool) -> tuple[int, int]:
    """(turn, position) of position t, by counting."""
    if not by_turn:
        return 0, sum(row[:t])
    turn, position, before = 0, 0, 0
    for value in row[: t + 1]:
        if value and not before:
            turn, position = turn + 1, 0
        elif value:
            position += 1
        before = value
    return turn, position


def loop_reference(work: Case, *, by_turn: bool) -> torch.Tensor:
    """Equation (8) of arXiv:2602.07078 by loops, with the rule for tokens without a sibling."""
    out = torch.zeros_like(work.rewards)
    mask = work.mask.long().tolist()
    share, square = work.old_log_probs.exp(), squares_of(work)
    to_go, weight = {}, {}
    for i, row in enumerate(mask):
        for t, live in enumerate(row):
            if live:
                to_go[i, t] = sum(float(work.rewards[i, s]) for s in range(t, len(row)) if row[s])
                weight[i, t] = 1e-8 + sum(float(1 - 2 * share[i, s] + square[i, s]) for s in range(t + 1) if row[s])
    for i, row in enumerate(mask):
        baseline = None
        for t, live in enumerate(row):
            if not live:
                continue
            peers = [
                (j, s)
                for (j, s) in to_go
                if work.group_id[j] == work.group_id[i]
                and slot_of(mask[j], s, by_turn=by_turn) == slot_of(row, t, by_turn=by_turn)
            ]
            if len(peers) > 1:
                total = sum(weight[peer] for peer in peers)
                baseline = sum(weight[peer] * to_go[peer] for peer in peers) / total
            if baseline is not None:
                out[i, t] = to_go[i, t] - baseline
    return out


@pytest.mark.parametrize(("name", "by_turn"), [("optimal_token_baseline", False), ("tir_optimal_token_baseline", True)])
def test_both_estimators_equal_their_plain_loop_reference(name: str, by_turn: bool) -> None:
    work = case()
    found, _ = ADVANTAGES[name](
        token_rewards=work.rewards,
        mask=work.mask,
        group_id=work.group_id,
        config=algorithm(),
        old_log_probs=work.old_log_probs,
        old_sum_pi_squared=squares_of(work),
    )
    torch.testing.assert_close(found, loop_reference(work, by_turn=by_turn), atol=1e-12, rtol=0)


def test_the_two_estimators_agree_on_single_turn_rows_and_differ_on_others() -> None:
    work = case()
    calls = dict(
        token_rewards=work.rewards,
        group_id=work.group_id,
        config=algorithm(),
        old_log_probs=work.old_log_probs,
        old_sum_pi_squared=squares_of(work),
    )
    one, two = ADVANTAGES["optimal_token_baseline"], ADVANTAGES["tir_optimal_token_baseline"]
    single = torch.arange(6) < torch.tensor([6, 3, 1, 0, 3, 2, 4, 5])[:, None]
    assert torch.equal(one(mask=single, **calls)[0], two(mask=single, **calls)[0])
    assert not torch.equal(one(mask=work.mask, **calls)[0], two(mask=work.mask, **calls)[0])


def test_equal_energy_gives_the_group_mean() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    found, _ = ADVANTAGES["optimal_token_baseline"](
        token_rewards=rewards,
        mask=torch.ones(4, 1, dtype=torch.bool),
        group_id=torch.zeros(4, dtype=torch.int64),
        config=algorithm(),
        old_log_probs=torch.full((4, 1), math.log(0.5)),
        old_sum_pi_squared=torch.full((4, 1), 0.5),
    )
    assert found[:, 0].tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_correction_weights_enter_the_energy_squared() -> None:
    """Weights 2 and 1 on rewards 1 and 0: baseline 4 / 5."""
    found, _ = ADVANTAGES["optimal_token_baseline"](
        token_rewards=torch.tensor([[1.0], [0.0]]),
        mask=torch.ones(2, 1, dtype=torch.bool),
        group_id=torch.zeros(2, dtype=torch.int64),
        config=algorithm(),
        old_log_probs=torch.full((2, 1), math.log(0.5)),
        old_sum_pi_squared=torch.full((2, 1), 0.5),
        correction_weights=torch.tensor([[2.0], [1.0]]),
    )
    assert found[:, 0].tolist() == pytest.approx([0.2, -0.8], abs=1e-6)


def test_the_energy_is_the_squared_distance_of_the_token_from_the_distribution() -> None:
    """|e_y - pi|^2, the definition; a certain token has none, however its float32 numbers were rounded."""
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    log_probs = torch.log_softmax(logits, dim=-1)
    share = log_probs.exp()
    mask = torch.ones(50, 1, dtype=torch.bool)
    squares = share.square().sum(1, keepdim=True)
    found = gradient_energy(log_probs=log_probs[:, :1], sum_pi_squared=squares, mask=mask)
    onehot = torch.zeros_like(share)
    onehot[:, 0] = 1
    torch.testing.assert_close(found[:, 0], (onehot - share).square().sum(1))
    certain = gradient_energy(
        log_probs=torch.zeros(1, 1), sum_pi_squared=torch.full((1, 1), 1 - 1e-7), mask=torch.ones(1, 1).bool()
    )
    assert certain.item() == 0.0


def test_slots_count_policy_tokens_or_turn_and_position() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0, 0]]).bool()
    assert lists(policy_slots(mask).double(), mask) == [[0, 1, 2]]
    assert lists(turn_slots(mask).double(), mask) == [[6, 7, 12]]
    assert padded([[6, 7, 12]], mask)[0, 3].item() == 12
