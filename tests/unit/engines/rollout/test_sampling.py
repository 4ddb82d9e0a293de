"""The reference sampler against distributions worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.engines.rollout.base import SamplingParams
from hybridflow.engines.rollout.sampling import draw, sampler_log_probs

LOGITS = torch.tensor([[2.0, 1.0, 0.0]])


def distribution(**settings) -> list[float]:
    return sampler_log_probs(LOGITS, [SamplingParams(max_tokens=1, **settings)], vocab_limit=3)[0].tolist()


def test_the_log_prob_is_of_the_tempered_distribution() -> None:
    assert distribution(temperature=0.5) == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)


def test_top_p_renormalises_what_it_keeps() -> None:
    assert distribution(top_p=0.9) == pytest.approx([-0.313262, -1.313262, -math.inf], abs=1e-6)


@pytest.mark.parametrize("off", [-1, 0, 3, 7])
def test_top_k_is_off_at_minus_one_zero_or_the_whole_vocabulary(off: int) -> None:
    assert distribution(top_k=off) == pytest.approx([-0.407606, -1.407606, -2.407606], abs=1e-6)


def test_top_k_of_one_leaves_certainty() -> None:
    assert distribution(top_k=1) == [0.0, -math.inf, -math.inf]


def test_top_p_counts_only_what_top_k_left() -> None:
    # after top-k 2 the first id has mass 0.731 >= 0.7, so top-p keeps it alone; of all three it would have 0.665
    assert distribution(top_k=2, top_p=0.7) == [0.0, -math.inf, -math.inf]
    assert distribution(top_p=0.7)[1] > -math.inf


def test_a_greedy_row_ignores_truncation_and_reports_temperature_one() -> None:
    assert distribution(temperature=0.0, top_k=1, top_p=0.1) == pytest.approx(
        [-0.407606, -1.407606, -2.407606], abs=1e-6
    )


def test_ids_beyond_the_vocabulary_limit_have_no_mass() -> None:
    row = sampler_log_probs(LOGITS, [SamplingParams(max_tokens=1)], vocab_limit=2)[0].tolist()
    assert row == pytest.approx([-0.313262, -1.313262, -math.inf], abs=1e-6)


def test_settings_of_one_row_do_not_touch_its_neighbours() -> None:
    settings = [SamplingParams(max_tokens=1, top_k=1), SamplingParams(max_tokens=1)]
    rows = sampler_log_probs(LOGITS.repeat(2, 1), settings, vocab_limit=3)
    assert rows[1].tolist() == pytest.approx(distribution(), abs=0)


def test_draws_follow_the_distribution_and_never_leave_its_support() -> None:
    settings = [SamplingParams(max_tokens=1, top_p=0.9)] * 4000
    log_probs = sampler_log_probs(LOGITS.repeat(4000, 1), settings, vocab_limit=3)
    ids = draw(log_probs, settings, [torch.Generator().manual_seed(seed) for seed in range(4000)])
    share = (ids == 0).double().mean().item()
    # three standard errors of a share of 0.731 over 4000 draws
    assert share == pytest.approx(math.exp(-0.313262), abs=3 * math.sqrt(0.731 * 0.269 / 4000))
    assert ids.max() == 1
