"""How far sampler and trainer are apart, over what the policy wrote in valid rows."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.agreement import sampler_agreement
from hybridflow.batch.batch import Batch


def batch(**columns) -> Batch:
    known = {
        "response_mask": torch.tensor([[True, True, False], [True, True, True]]),
        "valid": torch.tensor([True, False]),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0, 9.0], [5.0, 5.0, 5.0]]),
    }
    return Batch({**known, **columns})


def test_only_policy_tokens_of_valid_rows_count():
    found = sampler_agreement(
        batch(
            old_log_probs=torch.tensor([[-1.5, -2.1, 0.0], [0.0, 0.0, 0.0]]),
            old_entropy=torch.tensor([[0.2, 0.4, 7.0], [7.0, 7.0, 7.0]]),
        )
    )
    assert found == {
        "training/rollout_log_prob_diff/max": pytest.approx(0.5),
        "training/rollout_log_prob_diff/mean": pytest.approx(0.3),
        "actor/entropy_old": pytest.approx(0.3),
    }


def test_what_is_not_there_is_not_reported():
    assert sampler_agreement(batch()) == {}
    none = batch(old_log_probs=torch.zeros(2, 3), valid=torch.tensor([False, False]))
    assert sampler_agreement(none) == {}
