from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.lagrange import LagrangeMultiplier, combine
from hybridflow.config.algorithm import SafeRLHFConfig


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


def test_the_multiplier_never_overflows() -> None:
    multiplier = LagrangeMultiplier(SafeRLHFConfig(multiplier_lr=100.0))
    for _ in range(5):
        multiplier.update(mean_cost=1e6)
    assert math.isfinite(multiplier.value)


def test_the_combined_advantage_keeps_its_scale() -> None:
    reward, cost = torch.tensor([[2.0]]), torch.tensor([[1.0]])
    assert combine(reward_advantages=reward, cost_advantages=cost, multiplier=1.0).item() == 0.5
    assert combine(reward_advantages=reward, cost_advantages=cost, multiplier=0.0).item() == 2.0
