from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridflow.algorithms.aggregation import AGGREGATIONS, counts_of
from hybridflow.algorithms.masking import masked_mean
from hybridflow.algorithms.policy_loss import (
    COVARIANCE_LOSSES,
    POLICY_LOSSES,
    SEQUENCE_LEVEL,
    log_ratio,
    resolve,
)
from hybridflow.config.choices import POLICY_LOSSES as NAMES
from hybridflow.utils.errors import ColumnError, ConfigError
from tests.unit.algorithms.cases import Case, actor, case

SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": dict(clip_ratio_low=0.02, clip_ratio_high=0.05),
    "geo_mean": dict(clip_ratio=0.1),
    "cispo": dict(clip_ratio_low=0.15, clip_ratio_high=0.25),
    "vanilla": dict(clip_ratio_low=0.1, clip_ratio_high=0.2, clip_ratio_c=1.25),
    "kl_cov": dict(policy=dict(ppo_kl_coef=0.7)),
    "sapo": dict(policy=dict(tau_pos=1.5, tau_neg=2.5)),
    "dro": dict(policy=dict(dro_beta=0.6)),
    "dppo_tv": dict(policy=dict(dppo_threshold=0.05)),
    "dppo_kl": dict(policy=dict(dppo_threshold=0.02)),
}


def config_of(name: str, **changes: Any):
    return actor(name, **{**SETTINGS.get(name, {}), **changes})


def selected(work: Case) -> torch.Tensor:
    return (torch.arange(work.mask.numel()).reshape(work.mask.shape) % 3 == 0) & work.mask


def run(name: str, work: Case, log_probs: torch.Tensor | None = None, **changes: Any):
    """(losses, measures) of a registered loss."""
    return POLICY_LOSSES[name](
        log_probs=work.log_probs if log_probs is None else log_probs,
        old_log_probs=work.old_log_probs,
        advantages=work.advantages,
        mask=work.mask,
        config=config_of(name, **changes),
        covariance_selected=selected(work),
    )


def mean_loss(name: str, work: Case, log_probs: torch.Tensor) -> torch.Tensor:
    mode = "seq-mean-token-mean"
    losses = run(name, work, log_probs)[0]
    return AGGREGATIONS[mode](losses=losses, mask=work.mask, counts=counts_of(work.mask), scale=1.0)


def token_term(name: str, log_prob: float, old: float, advantage: float, special: bool) -> tuple[float, float]:
    """(value, gradient in log_prob) of one token, by hand from each paper."""
    ratio = math.exp(log_prob - old)
    if name == "vanilla":
        clipped = min(max(ratio, 0.9), 1.2)
        value, slope = max((-advantage * ratio, -advantage * ratio), (-advantage * clipped, 0.0))
        if advantage * ratio == advantage * clipped:
            value, slope = -advantage * ratio, -advantage * ratio
        if advantage < 0 and value > -advantage * 1.25:
            value, slope = -advantage * 1.25, 0.0
        return value, slope
    if name == "clip_cov":
        clipped = min(max(ratio, 0.8), 1.2)
        inside = ratio == clipped
        value = max(-advantage * ratio, -advantage * clipped)
        slope = -advantage * ratio if inside or -advantage * ratio > -advantage * clipped else 0.0
        return (0.0, 0.0) if special else (value, slope)
    if name == "kl_cov":
        x = log_prob - old
        extra = (0.7 * abs(x), 0.7 * math.copysign(1, x)) if special else (0.0, 0.0)
        return -advantage * ratio + extra[0], -advantage * ratio + extra[1]
    if name == "sapo":
        tau = 1.5 if advantage > 0 else 2.5
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio
    if name == "cispo":
        weight = min(max(ratio, 0.85), 1.25)
        return -advantage * weight * log_prob, -advantage * weight
    if name in ("gpg", "reinforce"):
        return -advantage * log_prob, -advantage
    if name == "dro":
        x = log_prob - old
        return -(advantage * log_prob - 0.5 * 0.6 * x * x), -(advantage - 0.6 * x)
    if name in ("dppo_tv", "dppo_kl"):
        p, q = math.exp(log_prob), math.exp(old)
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        far = abs(p - q) > 0.05 if name == "dppo_tv" else kl > 0.02
        away = (p > q) if advantage > 0 else (p < q)
        return (0.0, 0.0) if far and away else (-advantage * ratio, -advantage * ratio)
    raise AssertionError(name)


def test_the_registry_holds_exactly_the_allowed_names() -> None:
    assert tuple(POLICY_LOSSES) == NAMES
    assert set(POLICY_LOSSES) >= SEQUENCE_LEVEL | COVARIANCE_LOSSES


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SEQUENCE_LEVEL])
def test_token_losses_equal_hand_derived_values_and_gradients(name: str, seed: int) -> None:
    work = case(seed)
    log_probs = work.log_probs.clone().requires_grad_()
    losses, _ = run(name, work, log_probs)
    losses.sum().backward()
    for i in range(len(losses)):
        for t in range(losses.shape[1]):
            if not work.mask[i, t]:
                assert losses[i, t].item() == 0.0
                assert log_probs.grad[i, t].item() == 0.0
                continue
            value, slope = token_term(
                name,
                work.log_probs[i, t].item(),
                work.old_log_probs[i, t].item(),
                work.advantages[i, t].item(),
                bool(selected(work)[i, t]),
            )
            assert losses[i, t].item() == pytest.approx(value, rel=1e-9, abs=1e-12)
            assert log_probs.grad[i, t].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)


SMOOTH = ["vanilla", "geo_mean", "sapo", "gpg", "reinforce", "dro", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"]


@pytest.mark.parametrize("name", SMOOTH)
def test_losses_that_are_functions_of_the_log_probs_pass_gradcheck(name: str) -> None:
    """cispo and gspo are missing on purpose: a stopped gradient is their definition."""
    work = case()
    log_probs = work.log_probs.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: mean_loss(name, work, x), (log_probs,), atol=1e-6)


def rows_of(work: Case) -> list[tuple[int, list[int]]]:
    return [(i, row.nonzero().squeeze(1).tolist()) for i, row in enumerate(work.mask) if row.any()]


def test_gspo_equals_the_sequence_form_in_value_and_gradient() -> None:
    """arXiv:2507.18071 equation (5) by loops, one advantage per row."""
    work = case()
    per_row = torch.where(work.mask, work.advantages[:, :1], 0.0)
    work = Case(**{**{n: getattr(work, n) for n in work.__dataclass_fields__}, "advantages": per_row})
    log_probs = work.log_probs.clone().requires_grad_()
    found = mean_loss("gspo", work, log_probs)
    found.backward()
    total, slopes = 0.0, torch.zeros_like(work.log_probs)
    rows = rows_of(work)
    for i, places in rows:
        a = float(work.advantages[i, places[0]])
        mean = sum(float(work.log_probs[i, t] - work.old_log_probs[i, t]) for t in places) / len(places)
        ratio, clipped = math.exp(mean), min(max(math.exp(mean), 0.98), 1.05)
        total += max(-a * ratio, -a * clipped) / len(rows)
        if -a * ratio >= -a * clipped:
            slopes[i, places] = -a * ratio / len(places) / len(rows)
    assert found.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(log_probs.grad, slopes, atol=1e-12, rtol=0)


def test_gmpo_equals_the_geometric_mean_of_one_sidedly_clipped_ratios() -> None:
    """arXiv:2507.20673 equation (6) by loops."""
    work = case()
    total, rows = 0.0, rows_of(work)
    for i, places in rows:
        logs = []
        for t in places:
            x, a = float(work.log_probs[i, t] - work.old_log_probs[i, t]), float(work.advantages[i, t])
            clipped = min(max(x, -0.1), 0.1)
            sign = math.copysign(1, a)
            logs.append(sign * min(sign * x, sign * clipped))
        mean_advantage = sum(float(work.advantages[i, t]) for t in places) / len(places)
        total += -mean_advantage * math.exp(sum(logs) / len(logs)) / len(rows)
    assert mean_loss("geo_mean", work, work.log_probs).item() == pytest.approx(total, rel=1e-12)


def test_row_ratios_ignore_padding_and_row_length() -> None:
    """A17: row ratios 1.221403 and 1.161834, loss is the mean over rows without length weighting."""
    log_ratios = torch.tensor([[0.3, 0.1, 9, 9], [-0.2, 0.4, 0.1, 0.3]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    old = torch.full((2, 4), -1.0, dtype=torch.float64)
    advantages = torch.tensor([[1.0] * 4, [-1.0] * 4], dtype=torch.float64)
    for name in SEQUENCE_LEVEL:
        losses, _ = POLICY_LOSSES[name](
            log_probs=old + log_ratios,
            old_log_probs=old,
            advantages=advantages,
            mask=mask,
            config=actor(name, clip_ratio=9.0),
        )
        assert losses[0, :2].tolist() == pytest.approx([-1.221403] * 2, abs=1e-6)
        assert losses[1].tolist() == pytest.approx([1.161834] * 4, abs=1e-6)
        share = AGGREGATIONS["seq-mean-token-mean"](losses=losses, mask=mask, counts=counts_of(mask), scale=1.0)
        assert share.item() == pytest.approx((1.161834 - 1.221403) / 2, abs=1e-6)


def test_the_clip_fraction_counts_tokens_whose_loss_the_clip_changed() -> None:
    """C08: ratios [.5, 1.5, .5, 1.5], A [1, 1, -1, -1], eps .2: losses [-.5, -1.2, .8, 1.5], mean .15, fraction .5."""
    ratio = torch.tensor([[0.5, 1.5, 0.5, 1.5]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    losses, measures = POLICY_LOSSES["vanilla"](
        log_probs=ratio.log(),
        old_log_probs=torch.zeros_like(ratio),
        advantages=torch.tensor([[1.0, 1, -1, -1]], dtype=torch.float64),
        mask=mask,
        config=actor(),
    )
    assert losses[0].tolist() == pytest.approx([-0.5, -1.2, 0.8, 1.5])
    assert losses.mean().item() == pytest.approx(0.15)
    assert masked_mean(measures["actor/pg_clipfrac"].double(), mask).item() == 0.5


def test_the_dual_clip_bounds_negative_advantages_and_stops_their_gradient() -> None:
    log_probs = torch.tensor([[math.log(10.0)]], requires_grad=True)
    losses, measures = POLICY_LOSSES["vanilla"](
        log_probs=log_probs,
        old_log_probs=torch.zeros(1, 1),
        advantages=torch.tensor([[-2.0]]),
        mask=torch.ones(1, 1, dtype=torch.bool),
        config=actor(clip_ratio_c=3.0),
    )
    losses.sum().backward()
    assert losses.item() == pytest.approx(6.0)
    assert log_probs.grad.item() == 0.0
    assert measures["actor/pg_clipfrac_lower"].item()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_mask_gives_loss_zero_whatever_the_advantages(name: str) -> None:
    """A11, A13."""
    work = case()
    empty = torch.zeros_like(work.mask)
    log_probs = work.log_probs.clone().requires_grad_()
    losses, _ = POLICY_LOSSES[name](
        log_probs=log_probs,
        old_log_probs=work.old_log_probs,
        advantages=work.advantages,
        mask=empty,
        config=config_of(name),
        covariance_selected=empty,
    )
    share = AGGREGATIONS["token-mean"](losses=losses, mask=empty, counts=counts_of(empty), scale=1.0)
    share.backward()
    assert share.item() == 0.0
    assert log_probs.grad.abs().max().item() == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_advantages_in_the_slot_of_the_mask_are_refused(name: str) -> None:
    """A13: keyword-only tensors, boolean masks."""
    work = case()
    with pytest.raises(TypeError):
        POLICY_LOSSES[name](
            log_probs=work.log_probs,
            old_log_probs=work.old_log_probs,
            advantages=work.advantages,
            mask=work.advantages,
            config=config_of(name),
            covariance_selected=selected(work),
        )
    with pytest.raises(TypeError):
        POLICY_LOSSES[name](work.log_probs, work.old_log_probs, work.advantages, work.mask, config_of(name))  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_at_the_old_policy_every_loss_has_the_plain_policy_gradient(name: str) -> None:
    """Ratio 1: the gradient is that of -A log pi (GMPO and GSPO: of the row's mean advantage over its length)."""
    work = case()
    old = work.old_log_probs.clone().requires_grad_()
    losses, _ = POLICY_LOSSES[name](
        log_probs=old,
        old_log_probs=work.old_log_probs,
        advantages=work.advantages,
        mask=work.mask,
        config=config_of(name),
        covariance_selected=torch.zeros_like(work.mask),
    )
    losses.sum().backward()
    expected = torch.where(work.mask, -work.advantages, 0.0)
    if name == "geo_mean":
        mean = masked_mean(work.advantages, work.mask, dim=1)[:, None]
        expected = torch.where(work.mask, -mean, 0.0)
    torch.testing.assert_close(old.grad, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_garbage_at_masked_positions_changes_neither_loss_nor_gradient(name: str) -> None:
    """A12, C12: nan, inf and huge fillers in log-probs, old log-probs and advantages."""
    clean, dirty, results = case(), case().poisoned(), []
    for work in (clean, dirty):
        log_probs = work.log_probs.clone().requires_grad_()
        losses, measures = run(name, work, log_probs)
        torch.where(work.mask, losses, 0.0).sum().backward()
        means = [masked_mean(value.double(), work.mask) for value in measures.values()]
        results.append((torch.where(work.mask, losses, 0.0), log_probs.grad, *means))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_ratios_stay_finite(name: str) -> None:
    for drift in (-1e4, 1e4):
        old = torch.full((1, 2), -1.0)
        log_probs = (old + drift).requires_grad_()
        for sign in (-1.0, 1.0):
            losses, _ = POLICY_LOSSES[name](
                log_probs=log_probs,
                old_log_probs=old,
                advantages=torch.full((1, 2), sign),
                mask=torch.ones(1, 2, dtype=torch.bool),
                config=config_of(name),
                covariance_selected=torch.ones(1, 2, dtype=torch.bool),
            )
            losses.sum().backward()
            assert losses.isfinite().all()
            assert log_probs.grad.isfinite().all()


def test_log_ratios_of_half_precision_log_probs_are_taken_in_float32() -> None:
    """C07."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert log_ratio(torch.tensor([[-1.0]]).bfloat16(), torch.tensor([[-1.001]]), mask).dtype == torch.float32


@pytest.mark.parametrize("name", sorted(COVARIANCE_LOSSES))
def test_covariance_losses_name_the_column_they_miss(name: str) -> None:
    work = case()
    with pytest.raises(ColumnError, match="covariance_selected"):
        POLICY_LOSSES[name](
            log_probs=work.log_probs,
            old_log_probs=work.old_log_probs,
            advantages=work.advantages,
            mask=work.mask,
            config=config_of(name),
        )


def test_dppo_masks_only_tokens_that_move_further_away() -> None:
    """p_old .5; p .7 and .3; A of both signs; threshold .1: only (A > 0, up) and (A < 0, down) are masked."""
    share = torch.tensor([[0.7, 0.3, 0.7, 0.3]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    for name, threshold in (("dppo_tv", 0.1), ("dppo_kl", 0.05)):
        _, measures = POLICY_LOSSES[name](
            log_probs=share.log(),
            old_log_probs=torch.full_like(share, 0.5).log(),
            advantages=advantages,
            mask=torch.ones_like(share, dtype=torch.bool),
            config=actor(name, policy=dict(dppo_threshold=threshold)),
        )
        assert measures["actor/pg_clipfrac"].tolist() == [[True, False, False, True]]


def test_an_unknown_loss_raises_and_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="geo_mean"):
        resolve("vanila")
    assert resolve("hybridflow.algorithms.policy_loss:gspo") is POLICY_LOSSES["gspo"]
