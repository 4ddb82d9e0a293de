from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.masking import keep, masked_mean
from hybridflow.algorithms.rewards import (
    RewardNormalizer,
    overlong_penalty,
    place_scores,
    reward_components,
    shape_scores,
    subtract_kl,
)
from hybridflow.config.algorithm import RewardShapingConfig
from hybridflow.config.reward import OverlongConfig
from hybridflow.utils.errors import ColumnError


def shape(score: list[float], length: list[int], *, normalizer: RewardNormalizer | None = None, **shaping: object):
    return shape_scores(
        score=torch.tensor(score, dtype=torch.float64),
        response_length=torch.tensor(length),
        max_response_length=10,
        shaping=RewardShapingConfig(**shaping),
        overlong=OverlongConfig(),
        normalizer=normalizer,
    ).tolist()


def test_a_score_lands_on_the_last_trainable_token() -> None:
    """B07: a row that ends in tool text, a gap, one token, none at all."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    placed = place_scores(scores=torch.tensor([1.0, 2.0, 3.0, float("nan")]), mask=mask)
    assert placed.tolist() == [[0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 0, 0]]
    assert place_scores(scores=torch.ones(2), mask=torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)


def test_kl_of_tokens_the_policy_did_not_write_costs_nothing() -> None:
    """B09: KL [.1, 5, .1] with mask [1, 0, 1]: masked KL 0, logged mean .1."""
    mask, kl = torch.tensor([[1, 0, 1]]).bool(), torch.tensor([[0.1, 5.0, 0.1]])
    rewards = subtract_kl(token_rewards=torch.tensor([[0.0, 0.0, 1.0]]), kl=kl, mask=mask, kl_coef=1.0)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.0, 0.9]]))
    assert masked_mean(kl, mask).item() == pytest.approx(0.1)


def test_no_input_is_written_to() -> None:
    """C06: the KL tensor that is logged stays the raw one."""
    mask, kl = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[0.1, 0.2]])
    rewards, scores = torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])
    before = [x.clone() for x in (kl, rewards, scores)]
    subtract_kl(token_rewards=rewards, kl=kl, mask=mask, kl_coef=0.5)
    place_scores(scores=scores, mask=mask)
    shape([3.0], [2], clip=1.0, length_penalty=0.5)
    assert all(torch.equal(now, then) for now, then in zip((kl, rewards, scores), before, strict=True))


def test_masked_nan_log_probs_do_not_reach_the_reward() -> None:
    """A12, C12."""
    mask = torch.tensor([[True, False]])
    log_probs = torch.tensor([[-1.0, float("nan")]])
    kl = kl_estimate(kind="k3", log_probs=keep(log_probs, mask), ref_log_probs=keep(log_probs, mask))
    rewards = subtract_kl(token_rewards=torch.zeros(1, 2), kl=kl, mask=mask, kl_coef=1.0)
    assert rewards.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (6, 0.0), (7, -0.125), (8, -0.25), (10, -0.5), (12, -0.5)])
def test_the_overlong_penalty_grows_in_the_buffer(length: int, penalty: float) -> None:
    """Limit 10, buffer 4, factor 0.5: 0 up to 6 tokens, -0.5 at 10 and beyond."""
    config = OverlongConfig(enable=True, len=4, penalty_factor=0.5)
    found = overlong_penalty(response_length=torch.tensor([length]), max_response_length=10, config=config)
    assert found.tolist() == [penalty]


def test_the_overlong_penalty_is_off_by_default() -> None:
    found = overlong_penalty(response_length=torch.tensor([10]), max_response_length=10, config=OverlongConfig(len=4))
    assert found.tolist() == [0.0]


def test_shaping_clips_before_the_length_penalty() -> None:
    assert shape([5.0, -5.0, 0.5], [2, 4, 0], clip=1.0, length_penalty=0.1) == pytest.approx([0.8, -1.4, 0.5])


def test_running_normalisation_is_an_exponential_average_with_bias_correction() -> None:
    normalizer = RewardNormalizer(momentum=0.9)
    normalizer.update(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
    assert (normalizer.mean, normalizer.std) == (pytest.approx(2.0), pytest.approx(1.0))
    normalizer.update(torch.tensor([5.0]), torch.tensor([True]))
    mean = (0.09 * 2.0 + 0.1 * 5.0) / 0.19
    square = (0.09 * 5.0 + 0.1 * 25.0) / 0.19
    assert normalizer.mean == pytest.approx(mean)
    assert normalizer.std == pytest.approx(math.sqrt(square - mean**2))
    assert shape([mean], [1], normalize=True, normalizer=normalizer) == pytest.approx([0.0], abs=1e-12)


@pytest.mark.parametrize("level", [0.0, 3.3, 1e8])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99])
def test_running_moments_are_those_of_all_scores_so_far_with_fading_weights(momentum: float, level: float) -> None:
    """Step j of k weighs momentum^(k - j), shared equally by its scores. Two passes over all scores: mean, then spread
    about it; with a level of 1e8 nothing of the spread survives in a mean of squares (1e16, 16 digits)."""
    g, normalizer, steps = torch.Generator().manual_seed(0), RewardNormalizer(momentum), []
    for size in (5, 1, 4, 2):
        scores = level + torch.randn(size, generator=g, dtype=torch.float64)
        present = torch.ones(size, dtype=torch.bool)
        present[0] = size == 1
        steps.append(scores[present].tolist())
        normalizer.update(scores, present)
        weights = [momentum ** (len(steps) - 1 - j) / len(own) for j, own in enumerate(steps) for _ in own]
        flat = [score for own in steps for score in own]
        mean = level + sum(w * (x - level) for w, x in zip(weights, flat, strict=True)) / sum(weights)
        variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, flat, strict=True)) / sum(weights)
        assert normalizer.mean == pytest.approx(mean, rel=1e-14, abs=1e-14)
        assert normalizer.std == pytest.approx(math.sqrt(variance), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("score", [0.1, 3.3, 1 / 3, 1e6 + 0.1])
def test_equal_scores_that_are_not_exact_in_binary_have_no_running_spread(score: float) -> None:
    """B02: whatever is scored next is centred, not blown up by a deviation of rounding."""
    normalizer = RewardNormalizer(momentum=0.9)
    for _ in range(3):
        normalizer.update(torch.full((7,), score, dtype=torch.float64), torch.ones(7, dtype=torch.bool))
    assert shape([score + 1], [1], normalize=True, normalizer=normalizer) == pytest.approx([1.0], rel=1e-6)


def test_the_normaliser_is_saved_and_ignores_empty_steps() -> None:
    normalizer = RewardNormalizer(momentum=0.5)
    normalizer.update(torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    normalizer.update(torch.tensor([float("nan")]), torch.tensor([False]))
    other = RewardNormalizer(momentum=0.5)
    other.load_state_dict(normalizer.state_dict())
    assert (other.mean, other.std) == (1.5, 0.5)


def test_equal_scores_are_only_centred() -> None:
    normalizer = RewardNormalizer(momentum=0.5)
    normalizer.update(torch.full((4,), 0.5), torch.ones(4, dtype=torch.bool))
    assert shape([0.5, 1.5], [1, 1], normalize=True, normalizer=normalizer) == pytest.approx([0.0, 1.0])


def test_normalisation_without_a_normaliser_is_an_error() -> None:
    with pytest.raises(ValueError, match="RewardNormalizer"):
        shape([1.0], [1], normalize=True)


def test_components_are_read_by_name_and_missing_ones_are_nan() -> None:
    """H02: extra fields present for part of the rows only."""
    info = [{"format": 1, "answer": 0.5}, {"format": True}, {"answer": "x", "format": 0.0}]
    table = reward_components(reward_info=info, keys=("format", "answer"), scored=torch.ones(3).bool())
    assert table[:, 0].tolist() == [1.0, 1.0, 0.0]
    assert table[0, 1].item() == 0.5
    assert table[1:, 1].isnan().all()


def test_a_component_that_no_row_has_is_an_error_that_names_it() -> None:
    info = [{"format": 1.0}, {"failure": "timeout"}]
    with pytest.raises(ColumnError, match="'style'"):
        reward_components(reward_info=info, keys=("format", "style"), scored=torch.tensor([True, False]))
    nothing = reward_components(reward_info=info, keys=("style",), scored=torch.zeros(2).bool())
    assert nothing.isnan().all(), "rows that were not scored do not say what the function returns"
