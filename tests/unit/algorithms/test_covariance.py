from __future__ import annotations

import statistics

import pytest
import torch

from hybridflow.algorithms.covariance import select_by_covariance, token_covariance
from hybridflow.config.actor import PolicyLossConfig
from tests.unit.algorithms.cases import Case, case


def select(work: Case, **changes: object) -> torch.Tensor:
    return select_by_covariance(
        log_probs=work.old_log_probs,
        advantages=work.advantages,
        mask=work.mask,
        config=PolicyLossConfig(**changes),
    )


def loop_covariance(work: Case) -> dict[tuple[int, int], float]:
    places = work.mask.nonzero().tolist()
    log_probs = [float(work.old_log_probs[i, t]) for i, t in places]
    advantages = [float(work.advantages[i, t]) for i, t in places]
    level, centre = statistics.fmean(advantages), statistics.fmean(log_probs)
    return {(i, t): (x - centre) * (a - level) for (i, t), x, a in zip(places, log_probs, advantages, strict=True)}


def test_covariance_equals_its_definition() -> None:
    work = case()
    found = token_covariance(log_probs=work.old_log_probs, advantages=work.advantages, mask=work.mask)
    for (i, t), value in loop_covariance(work).items():
        assert found[i, t].item() == pytest.approx(value, rel=1e-12)
    assert found[~work.mask].abs().max().item() == 0.0


def test_kl_cov_takes_the_highest_share() -> None:
    work = case()
    expected = sorted(loop_covariance(work).items(), key=lambda item: -item[1])[:4]  # 0.2 of 23 tokens
    found = select(work, loss_mode="kl_cov", kl_cov_ratio=0.2)
    assert {tuple(place) for place in found.nonzero().tolist()} == {place for place, _ in expected}


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_a_share_stays_a_share_where_no_token_differs_from_another(mode: str) -> None:
    """All advantages equal, as in a batch without spread: every covariance is 0, and still 4 of 23 are selected."""
    work = Case(**{**case().__dict__, "advantages": torch.zeros_like(case().advantages)})
    found = select(work, loss_mode=mode, kl_cov_ratio=0.2, clip_cov_ratio=0.2, clip_cov_lb=0.0, clip_cov_ub=1.0)
    assert found.sum().item() == 4
    assert not (found & ~work.mask).any()


def test_clip_cov_draws_within_its_band() -> None:
    work = case()
    found = select(work, loss_mode="clip_cov", clip_cov_ratio=0.15, clip_cov_lb=0.05, clip_cov_ub=1.0)
    covariance = loop_covariance(work)
    assert found.sum().item() == 3
    assert all(0.05 <= covariance[i, t] <= 1.0 for i, t in found.nonzero().tolist())
    everything = select(work, loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.05, clip_cov_ub=1.0)
    assert everything.sum().item() == sum(0.05 <= value <= 1.0 for value in covariance.values())


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_the_selection_follows_its_rows(mode: str) -> None:
    work = case()
    order = torch.tensor([3, 7, 0, 2, 6, 1, 5, 4])
    settings = dict(loss_mode=mode, clip_cov_ratio=0.1, kl_cov_ratio=0.1, clip_cov_lb=0.0, clip_cov_ub=9.0)
    assert torch.equal(select(work.rows(order), **settings), select(work, **settings)[order])


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_garbage_and_empty_batches_select_nothing_masked(mode: str) -> None:
    work = case().poisoned()
    assert not (select(work, loss_mode=mode, kl_cov_ratio=1.0, clip_cov_ratio=1.0) & ~work.mask).any()
    nothing = Case(**{**work.__dict__, "mask": torch.zeros_like(work.mask)})
    assert not select(nothing, loss_mode=mode).any()


def test_a_share_of_tokens_is_a_share_of_unmasked_ones_and_padding_is_never_kept() -> None:
    """C13: twelve values .1 .. 1.2, the last two padded, keep the top 20 %: two of the ten real tokens."""
    log_probs = -torch.arange(1, 13, dtype=torch.float64)[None] / 10
    mask = torch.arange(12)[None] < 10
    highest = select_by_covariance(
        log_probs=log_probs,
        advantages=log_probs.clone(),
        mask=mask,
        config=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.2),
    )
    # (x - mean)^2 of .1 .. 1.0 is largest at both ends; the padded 1.1 and 1.2 lie further out still.
    assert highest[0].nonzero().flatten().tolist() == [0, 9]
    drawn = select_by_covariance(
        log_probs=log_probs,
        advantages=log_probs.clone(),
        mask=mask,
        config=PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.0, clip_cov_ub=10.0),
    )
    assert drawn[0].tolist() == mask[0].tolist()
