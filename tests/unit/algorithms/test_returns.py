from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms import masking
from hybridflow.algorithms import returns as scans
from hybridflow.algorithms.returns import generalized_advantages, outcome, rewards_to_go
from tests.unit.algorithms.cases import case, lists, padded


def loop_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 of arXiv:1506.02438 as a sum over the future: sum_l (gamma lam)^l delta_{t+l}."""
    values = [*values, 0.0]
    delta = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))]


def scan(rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float) -> list[float]:
    found, _ = generalized_advantages(
        token_rewards=torch.tensor([rewards], dtype=torch.float64),
        values=torch.tensor([values], dtype=torch.float64),
        mask=torch.tensor([mask]).bool(),
        gamma=gamma,
        lam=lam,
    )
    return found[0].tolist()


def test_values_at_masked_positions_are_neither_bootstrapped_from_nor_decayed_through() -> None:
    """B06 (1): [.95, 1, 0] (buggy [5.7, 6, ..])."""
    assert scan([0, 1, 0], [0, 0, 100], [1, 1, 0], 1.0, 0.95) == pytest.approx([0.95, 1.0, 0.0])


def test_a_tool_gap_is_transparent() -> None:
    """B06 (2): [.50624, .592, 0, 0, .6], the same as the compacted row."""
    found = scan([0, 0, 9, 0, 1], [0.1, 0.2, 50, 50, 0.4], [1, 1, 0, 0, 1], 0.9, 0.8)
    assert found == pytest.approx([0.50624, 0.592, 0, 0, 0.6])
    assert scan([0, 0, 1], [0.1, 0.2, 0.4], [1, 1, 1], 0.9, 0.8) == pytest.approx([0.50624, 0.592, 0.6])


def test_the_terminal_reward_is_not_lost_when_a_row_ends_in_tool_text() -> None:
    """B07: gamma 0 gives advantage 1 at the last trainable token, gamma 1 at both."""
    assert scan([0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], 0.0, 1.0) == [0, 1, 0, 0]
    assert scan([0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], 1.0, 1.0) == [1, 1, 0, 0]


def test_nothing_is_bootstrapped_after_the_last_trainable_token() -> None:
    """B14: junk critic output on padding does not leak into earlier advantages."""
    clean = scan([0, 0, 0, 1, 0], [0.1, 0.2, 0.3, 0.4, 0.0], [1, 1, 1, 1, 0], 1.0, 0.5)
    assert scan([0, 0, 0, 1, 0], [0.1, 0.2, 0.3, 0.4, 1e9], [1, 1, 1, 1, 0], 1.0, 0.5) == clean
    assert clean[3] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("rewards", "mask", "gamma", "expected"),
    [
        ([0, 0, 1], [1, 0, 1], 0.5, [0.5, 0, 1]),
        ([0, 0, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1], 1.0, [1, 1, 0, 0, 1, 1]),
    ],
)
def test_rewards_to_go_pass_through_masked_tokens(
    rewards: list[float], mask: list[int], gamma: float, expected: list[float]
) -> None:
    """B08."""
    found = rewards_to_go(
        token_rewards=torch.tensor([rewards], dtype=torch.float64), mask=torch.tensor([mask]).bool(), gamma=gamma
    )
    assert found[0].tolist() == expected


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_the_scan_equals_the_definition_on_compacted_rows(gamma: float, lam: float) -> None:
    work = case()
    advantages, returns = generalized_advantages(
        token_rewards=work.rewards, values=work.values, mask=work.mask, gamma=gamma, lam=lam
    )
    rewards, values = lists(work.rewards, work.mask), lists(work.values, work.mask)
    expected = padded([loop_gae(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)], work.mask)
    torch.testing.assert_close(advantages, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(returns, torch.where(work.mask, expected + work.values, 0.0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 6, 7, 32])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_blocks_of_the_scan_do_not_matter(monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int) -> None:
    """Blocks of rows and of tokens, with gaps and without: only the order of float64 sums differs."""
    work = case()
    call = dict(token_rewards=work.rewards, values=work.values, mask=work.mask, gamma=0.9, lam=0.8)
    whole = generalized_advantages(**call)
    monkeypatch.setattr(masking, "BLOCK_ELEMENTS", 6 * rows)
    monkeypatch.setattr(scans, "SCAN_TOKENS", tokens)
    for one, other in zip(whole, generalized_advantages(**call), strict=True):
        torch.testing.assert_close(one, other, atol=1e-14, rtol=1e-14)


def test_long_rows_equal_a_loop_over_tokens() -> None:
    """300 tokens, gaps, a row that starts late, an all-masked row; sums over a thousand terms in another order."""
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(6, 300, generator=g).double(), torch.randn(6, 300, generator=g).double()
    mask = torch.rand(6, 300, generator=g) > 0.3
    mask[1] = torch.arange(300) < 177
    mask[2] = (torch.arange(300) >= 40) & (torch.arange(300) < 288)
    mask[3] = False
    advantages, returns = generalized_advantages(token_rewards=rewards, values=values, mask=mask, gamma=0.99, lam=0.95)
    for row in range(6):
        carried = following = 0.0
        for t in reversed(range(300)):
            if not mask[row, t]:
                assert advantages[row, t] == returns[row, t] == 0.0
                continue
            value = values[row, t].item()
            carried = rewards[row, t].item() + 0.99 * following - value + 0.99 * 0.95 * carried
            following = value
            assert advantages[row, t].item() == pytest.approx(carried, rel=1e-12, abs=1e-12)
            assert returns[row, t].item() == pytest.approx(carried + value, rel=1e-12, abs=1e-12)


def test_a_long_row_carries_its_reward_to_the_first_token() -> None:
    rewards = torch.zeros(1, 131, dtype=torch.float64)
    rewards[0, -1] = 1.0
    found = rewards_to_go(token_rewards=rewards, mask=torch.ones(1, 131, dtype=torch.bool), gamma=0.99)
    assert found[0].tolist() == pytest.approx([0.99 ** (130 - t) for t in range(131)])


def test_float32_columns_are_scanned_in_float64() -> None:
    """Values near 1e4 with advantages near 1e-3: a float32 scan would lose them."""
    rewards, values = torch.full((1, 50), 1e-3), torch.full((1, 50), 1e4)
    mask = torch.ones(1, 50, dtype=torch.bool)
    found, _ = generalized_advantages(token_rewards=rewards, values=values, mask=mask, gamma=1.0, lam=0.0)
    assert found[0, :-1].tolist() == pytest.approx([1e-3] * 49, rel=1e-6)


def test_an_empty_response_block_is_handled() -> None:
    empty = torch.zeros(2, 0)
    advantages, returns = generalized_advantages(
        token_rewards=empty, values=empty, mask=empty.bool(), gamma=1.0, lam=1.0
    )
    assert advantages.shape == returns.shape == (2, 0)
    assert outcome(empty, empty.bool()).tolist() == [0.0, 0.0]


def test_rewards_on_masked_tokens_do_not_count_for_the_outcome() -> None:
    """B12."""
    rewards = torch.tensor([[1.0, 5.0], [2.0, float("nan")]])
    assert outcome(rewards, torch.tensor([[1, 0], [1, 0]]).bool()).tolist() == [1.0, 2.0]
