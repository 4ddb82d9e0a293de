from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.advantages import resolve
from hybridflow.algorithms.losses import ActorLoss
from tests.invariants.test_algorithm_splits import assert_any_cut_is_the_whole
from tests.unit.algorithms.cases import actor, algorithm, case

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "custom_advantage"))
    monkeypatch.syspath_prepend(str(EXAMPLES / "custom_loss"))


def test_the_custom_advantage_is_the_distance_to_the_group_median() -> None:
    estimator = resolve("advantage:median_baseline")
    rewards = torch.tensor([[1.0], [0.0], [0.5], [9.0], [2.0]])
    mask = torch.tensor([[True], [True], [True], [True], [False]])
    found, _ = estimator(
        token_rewards=rewards, mask=mask, group_id=torch.tensor([4, 4, 4, 1, 1]), config=algorithm(), score=None
    )
    assert found[:, 0].tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]


def test_the_custom_advantage_ignores_garbage() -> None:
    estimator, clean, dirty = resolve("advantage:median_baseline"), case(), case().poisoned()
    found = [
        estimator(token_rewards=w.rewards, mask=w.mask, group_id=w.group_id, config=algorithm())[0]
        for w in (clean, dirty)
    ]
    assert torch.equal(*found)


def test_the_custom_loss_keeps_the_sum_contract() -> None:
    assert_any_cut_is_the_whole(ActorLoss(actor("loss:quadratic_penalty"), max_response_length=10))
