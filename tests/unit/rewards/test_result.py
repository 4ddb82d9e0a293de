"""What a reward function may return."""

import numpy as np
import pytest
import torch

from hybridflow.rewards.result import Result, as_score, failed, weighed, with_model, with_own_score


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


def test_the_score_is_the_weighted_sum_of_components_and_each_stays_apart():
    """H10: weights [.5, 2], components [1, 1]: 2.5; ``function`` is what the function itself returned."""
    result = with_own_score(Result(score=3.0, info={"format": 1, "answer": True, "note": "x"}))
    found = weighed(result, {"format": 0.5, "answer": 2.0})
    assert (found.score, found.valid) == (2.5, True)
    assert found.info == {"format": 1, "answer": True, "note": "x", "function": 3.0}
    assert weighed(result, {"function": 2.0, "format": -1.0}).score == 5.0
    judged = with_model(result, 0.25)
    assert weighed(judged, {"function": 1.0, "reward_model": 4.0}).score == 4.0


@pytest.mark.parametrize("info", [{}, {"format": "good"}, {"format": float("nan")}])
def test_a_missing_component_makes_the_sample_invalid_and_never_counts_as_zero(info):
    found = weighed(Result(score=1.0, info=info), {"format": 1.0})
    assert not found.valid and found.score != found.score
    assert found.cause is not None and found.cause.startswith("no component 'format'")
    assert weighed(failed("raised X"), {"format": 1.0}).cause == "raised X"
    assert with_own_score(failed("raised X")).info == {}


def test_step_rewards_are_pairs_of_characters_and_reward():
    _, extra = as_score({"score": 1, "step_rewards": [(np.int64(3), torch.tensor(0.5)), [7, 1]]})
    assert extra == {"step_rewards": ((3, 0.5), (7, 1.0))}


@pytest.mark.parametrize("steps", [0.5, [0.5], [(1, 2, 3)], [(1.5, 0.1)], [(1, "x")], "ab", {3: 0.5}])
def test_step_rewards_of_another_form_are_a_type_error(steps):
    with pytest.raises(TypeError):
        as_score({"score": 1, "step_rewards": steps})


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
