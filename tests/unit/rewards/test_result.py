"""What a reward function may return."""

import numpy as np
import pytest
import torch

from hybridflow.rewards.result import as_score


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([2]), 2.0),
        ({"score": 0.0, "rewards": 1.0}, 0.0),
        ({"score": torch.tensor(0.0)}, 0.0),
    ],
)
def test_every_number_is_a_score_and_zero_is_kept(returned, score):
    value, _ = as_score(returned)
    assert value == score
    assert type(value) is float


def test_further_entries_are_kept_as_plain_values():
    _, extra = as_score({"score": 1, "accuracy": np.float64(0.5), "note": "ok", "length": torch.tensor(7)})
    assert extra == {"accuracy": 0.5, "note": "ok", "length": 7}
    assert type(extra["accuracy"]) is float


@pytest.mark.parametrize(
    "returned", ["1", None, [1.0], (1.0,), np.array([1.0, 2.0]), {"reward": 1.0}, {}, 1j, object()]
)
def test_anything_else_is_a_type_error(returned):
    with pytest.raises(TypeError):
        as_score(returned)


@pytest.mark.parametrize("returned", [float("nan"), float("inf"), np.float32("nan"), {"score": float("nan")}, 10**400])
def test_a_score_is_finite(returned):
    with pytest.raises(ValueError, match="not finite"):
        as_score(returned)
