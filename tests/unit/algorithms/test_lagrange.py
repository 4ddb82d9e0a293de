from __future__ import annotations

import math
import statistics

import pytest
import torch

from hybridflow.algorithms.covariance import select_by_covariance
from hybridflow.algorithms.lagrange import LagrangeMultiplier, assign_cost_credit, combine, cost_reads
from hybridflow.batch.batch import Batch
from hybridflow.config.actor import PolicyLossConfig
from hybridflow.config.algorithm import SafeRLHFConfig
from tests.unit.algorithms.cases import Case, algorithm, case, lists, padded
from tests.unit.algorithms.test_returns import loop_gae


def test_the_multiplier_grows_while_the_limit_is_broken_and_is_saved() -> None:
    multiplier = LagrangeMultiplier(SafeRLHFConfig(cost_limit=1.0, multiplier_init=2.0, multiplier_lr=0.1))
    multiplier.update(mean_cost=3.0)
    assert multiplier.value == pytest.approx(2.0 * math.exp(0.1 * 2.0 * 2.0))
    other = LagrangeMultiplier(SafeRLHFConfig())
    other.load_state_dict(multiplier.state_dict())
    assert other.value == multiplier.value
    before = multiplier.value
    multiplier.update(mean_cost=float("nan"))
    assert multiplier.value == before
    multiplier.update(mean_cost=0.0)
    assert multiplier.value < before


def test_a_multiplier_may_start_at_zero() -> None:
    multiplier = LagrangeMultiplier(SafeRLHFConfig(multiplier_init=0.0))
    assert multiplier.value == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_of_high_covariance_are_those_of_the_advantages_that_are_trained_on(name: str) -> None:
    """Cui et al.: cov(log pi, A) of the objective; with a multiplier of 3 the cost decides, not the reward alone."""
    work, loss = case(), PolicyLossConfig(loss_mode=name, clip_cov_lb=0.0, clip_cov_ratio=0.2, kl_cov_ratio=0.2)
    batch, config = cost_batch(work, old_log_probs=work.old_log_probs), algorithm(adv_estimator="rloo")
    assert "old_log_probs" in (cost_reads(config, loss) or ()) and "old_log_probs" not in (cost_reads(config) or ())
    found, _ = assign_cost_credit(batch, config, multiplier=3.0, policy_loss=loss)

    def chosen_by(advantages: torch.Tensor) -> torch.Tensor:
        return select_by_covariance(log_probs=work.old_log_probs, advantages=advantages, mask=work.mask, config=loss)

    assert torch.equal(found["covariance_selected"], chosen_by(found["advantages"]))
    assert not torch.equal(found["covariance_selected"], chosen_by(work.advantages))
    assert "covariance_selected" not in assign_cost_credit(batch, config, multiplier=3.0)[0]


def test_the_multiplier_never_overflows() -> None:
    multiplier = LagrangeMultiplier(SafeRLHFConfig(multiplier_lr=100.0))
    for _ in range(5):
        multiplier.update(mean_cost=1e6)
    assert math.isfinite(multiplier.value)


def test_the_combined_advantage_keeps_its_scale() -> None:
    reward, cost = torch.tensor([[2.0]]), torch.tensor([[1.0]])
    assert combine(reward_advantages=reward, cost_advantages=cost, multiplier=1.0).item() == 0.5
    assert combine(reward_advantages=reward, cost_advantages=cost, multiplier=0.0).item() == 2.0


COST = torch.tensor([0.5, 2.0, 0.0, math.nan, 1.0, 1.5, 0.25, 3.0], dtype=torch.float64)


def cost_batch(work: Case, **more: torch.Tensor) -> Batch:
    """The fourth row is masked as a whole and has no cost."""
    return Batch(
        {"cost": COST, "loss_mask": work.mask, "group_id": work.group_id, "advantages": work.advantages, **more}
    )


def test_costs_are_credited_as_rewards_are_group_by_group() -> None:
    work = case()
    found, metrics = assign_cost_credit(cost_batch(work), algorithm(adv_estimator="rloo"), multiplier=3.0)
    expected, cost, group = [], COST.tolist(), work.group_id.tolist()
    alive = [i for i in range(8) if work.mask[i].any()]
    for i, row in enumerate(lists(work.advantages, work.mask)):
        others = [cost[j] for j in alive if group[j] == group[i] and j != i]
        of_cost = cost[i] - statistics.fmean(others) if others and i in alive else 0.0
        expected.append([(a - 3 * of_cost) / 4 for a in row])
    advantages = torch.where(work.mask, found["advantages"], 0.0)
    torch.testing.assert_close(advantages, padded(expected, work.mask), atol=1e-6, rtol=0)
    assert metrics["safe_rlhf/cost/mean"] == pytest.approx(statistics.fmean(cost[i] for i in alive))
    assert "cost_returns" not in found


def test_with_a_cost_critic_costs_have_returns_of_their_own() -> None:
    work = case()
    batch = cost_batch(work, cost_values=work.values)
    config = algorithm(adv_estimator="gae", gamma=0.9, lam=0.8)
    found, _ = assign_cost_credit(batch, config, multiplier=1.0)
    returns = []
    for cost, values in zip(COST.tolist(), lists(work.values, work.mask), strict=True):
        rewards = [0.0] * (len(values) - 1) + [cost] if values else []
        gains = loop_gae(rewards, values, 0.9, 0.8)
        returns.append([gain + value for gain, value in zip(gains, values, strict=True)])
    torch.testing.assert_close(found["cost_returns"].double(), padded(returns, work.mask), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["gae", "rloo", "optimal_token_baseline"])
def test_cost_credit_reads_what_it_declares_and_nothing_at_masked_positions(name: str) -> None:
    config, found = algorithm(adv_estimator=name), []
    for work in (case(), case().poisoned()):
        more = {
            "old_log_probs": work.old_log_probs,
            "old_sum_pi_squared": work.entropy,
            "response_ids": work.mask.long(),
        }
        values = {"cost_values": work.values, "values": work.rewards} if name == "gae" else {}
        batch = cost_batch(work, **more, **values)
        reads = {column.rstrip("?") for column in cost_reads(config) or ()}
        assert not {"response_ids", "values"} & reads
        added, _ = assign_cost_credit(batch.select(*(c for c in batch.names if c in reads)), config, multiplier=2.0)
        found.append({column: torch.where(work.mask, value, 0.0) for column, value in added.tensors().items()})
        order = torch.tensor([3, 7, 0, 2, 6, 1, 5, 4])
        moved, _ = assign_cost_credit(batch.rows(order), config, multiplier=2.0)
        same = torch.where(work.mask[order], moved["advantages"], 0.0)
        torch.testing.assert_close(same, found[-1]["advantages"][order], atol=1e-6, rtol=0)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][column]) for column, value in found[0].items())
