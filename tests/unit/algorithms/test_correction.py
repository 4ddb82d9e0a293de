from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridflow.algorithms.correction import (
    GUARD_ACTIONS,
    IS_LEVELS,
    REJECTIONS,
    accepted,
    correct,
    importance_weights,
    rejections,
)
from hybridflow.config import choices
from hybridflow.config.algorithm import RolloutCorrectionConfig
from hybridflow.utils.errors import ConfigError, EngineError
from tests.unit.algorithms.cases import Case, case, correction, lists, padded, unchecked


def test_the_names_are_the_allowed_ones() -> None:
    assert (IS_LEVELS, REJECTIONS, GUARD_ACTIONS) == (choices.IS_LEVELS, choices.REJECTIONS, choices.GUARD_ACTIONS)


def run(work: Case, **changes: Any):
    return correct(
        old_log_probs=work.old_log_probs,
        rollout_log_probs=work.rollout_log_probs,
        mask=work.mask,
        config=correction(**changes),
    )


def ratios(work: Case) -> list[list[float]]:
    """Log-ratios of the trainable tokens of every row."""
    return lists(work.old_log_probs - work.rollout_log_probs, work.mask)


def test_token_weights_are_truncated_ratios() -> None:
    work = case()
    expected = padded([[min(math.exp(x), 1.1) for x in row] for row in ratios(work)], work.mask)
    found = run(work, rollout_is="token", rollout_is_threshold=1.1).weights
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_sequence_weights_are_truncated_products_on_every_token() -> None:
    work = case()
    expected = padded([[min(math.exp(sum(row)), 1.1)] * len(row) for row in ratios(work)], work.mask)
    found = run(work, rollout_is="sequence", rollout_is_threshold=1.1).weights
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_a_rejected_token_stays_in_the_product_of_its_row() -> None:
    """The policy wrote it: the row is as likely as it is, whatever is trained of it. In bypass mode it is the same."""
    work = case()
    rejects = dict(rollout_rs="token", rollout_rs_threshold="0.9_1.15")
    found = run(work, rollout_is="sequence", rollout_is_threshold=1.1, **rejects)
    whole = run(work, rollout_is="sequence", rollout_is_threshold=1.1).weights
    assert (work.mask & ~found.mask).any()
    assert torch.equal(found.weights, torch.where(found.mask, whole, 0.0))
    normal = run(work, rollout_is="sequence", rollout_is_batch_normalize=True, **rejects)
    rows = normal.mask.any(dim=1)
    assert normal.weights.amax(dim=1)[rows].mean().item() == pytest.approx(1.0)


def test_batch_normalised_weights_have_mean_one_over_tokens_or_rows() -> None:
    work = case()
    token = run(work, rollout_is="token", rollout_is_batch_normalize=True).weights
    assert token[work.mask].mean().item() == pytest.approx(1.0)
    row = run(work, rollout_is="sequence", rollout_is_batch_normalize=True).weights
    assert row.amax(dim=1)[work.mask.any(dim=1)].mean().item() == pytest.approx(1.0)


def test_weights_carry_no_gradient() -> None:
    """C10: the gradient of a weighted loss is weight * d(loss)."""
    work = case()
    old = work.old_log_probs.clone().requires_grad_()
    result = correct(
        old_log_probs=old,
        rollout_log_probs=work.rollout_log_probs,
        mask=work.mask,
        config=correction(rollout_is="token"),
    )
    assert not result.weights.requires_grad
    torch.where(work.mask, result.weights * old, 0.0).sum().backward()
    torch.testing.assert_close(old.grad, result.weights)


LEVELS = {
    "token": lambda row, f: [f(x) for x in row],
    "seq_sum": lambda row, f: [sum(f(x) for x in row)] * len(row),
    "seq_mean": lambda row, f: [sum(f(x) for x in row) / max(len(row), 1)] * len(row),
    "seq_max": lambda row, f: [max((f(x) for x in row), default=0.0)] * len(row),
}
STATISTICS = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
LONG = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection_equals_its_definition(name: str) -> None:
    work = case()
    level, _, statistic = LONG.get(name, name).rpartition("_")
    threshold = "0.9_1.15" if statistic == "k1" else "0.02"
    found = run(work, rollout_rs=name, rollout_rs_threshold=threshold).mask
    kept = []
    for row in ratios(work):
        values = LEVELS[level](row, STATISTICS[statistic])
        inside = [0.9 <= math.exp(-v) <= 1.15 if statistic == "k1" else v <= 0.02 for v in values]
        kept.append([float(x) for x in inside])
    assert torch.equal(found, padded(kept, work.mask).bool())
    assert found.any()
    assert not torch.equal(found, work.mask)


def test_one_number_bounds_a_ratio_from_both_sides() -> None:
    (bound,) = rejections(correction(rollout_rs="token", rollout_rs_threshold=1.25))
    assert (bound.low, bound.high, bound.whole_rows) == (0.8, 1.25, False)
    (bound,) = rejections(correction(rollout_rs="sequence"))
    assert (bound.low, bound.high, bound.whole_rows) == (0.5, 2.0, True)  # rollout_is_threshold


def test_several_bounds_share_a_threshold_or_have_their_own() -> None:
    own = unchecked(correction(), rollout_rs="token_k1, seq_max_k2", rollout_rs_threshold="0.5_2, 0.1")
    one, two = rejections(own)
    assert (one.high, two.level, two.statistic, two.high) == (2.0, "seq_max", "k2", 0.1)
    assert [
        b.high for b in rejections(unchecked(correction(), rollout_rs="token_k2,seq_sum_k3", rollout_rs_threshold=0.3))
    ] == [0.3] * 2
    assert rejections(correction()) == ()


@pytest.mark.parametrize(
    ("name", "threshold", "message"),
    [
        ("tokens", 2.0, "use one of token"),
        ("seq_max_k1", 2.0, "unknown"),
        ("token", "a_b", "does not fit"),
        ("token", "2_1", "does not fit"),
        ("token", 0.5, "does not fit"),
        ("token_k2", None, "does not fit"),
        ("token_k3", "0.1_0.2", "does not fit"),
        ("token,sequence", "1.1,1.2,1.3", "3 entries for the 2 names"),
    ],
)
def test_bad_rejections_are_named(name: str, threshold: str | float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rejections(unchecked(correction(), rollout_rs=name, rollout_rs_threshold=threshold))


def test_an_unknown_level_of_weights_is_named() -> None:
    work = case()
    with pytest.raises(ConfigError, match="token, sequence"):
        importance_weights(log_ratio=work.values, mask=work.mask, config=unchecked(correction(), rollout_is="row"))


def test_the_veto_rejects_whole_rows_with_one_impossible_token() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    log_ratio = torch.tensor([[0.0, -10.0, 0.0], [0.0, -1.0, 0.0]])
    kept = accepted(log_ratio=log_ratio, mask=mask, config=correction(rollout_token_veto_threshold=1e-4))
    assert kept.tolist() == [[False] * 3, [True] * 3]


def test_a_long_row_does_not_overflow() -> None:
    mask = torch.ones(1, 4096, dtype=torch.bool)
    log_ratio = torch.full((1, 4096), 1.0)
    config = correction(rollout_is="sequence", rollout_is_threshold=1e12, rollout_rs="sequence")
    weights = importance_weights(log_ratio=log_ratio, mask=mask, config=config)
    assert weights[0, 0].item() == pytest.approx(math.exp(20), rel=1e-5)
    assert not accepted(log_ratio=log_ratio, mask=mask, config=config).any()


def test_equal_log_probs_are_left_alone_and_reported_as_no_mismatch() -> None:
    work = case()
    result = correct(
        old_log_probs=work.old_log_probs,
        rollout_log_probs=work.old_log_probs,
        mask=work.mask,
        config=correction(rollout_is="token", rollout_rs="geometric", rollout_rs_threshold=1.001),
    )
    assert torch.equal(result.mask, work.mask)
    assert torch.equal(result.weights, work.mask.double())
    metrics = result.metrics
    for name in (
        "kl",
        "k3_kl",
        "abs_log_ratio",
        "chi2_token",
        "chi2_seq",
        "log_ppl_diff",
        "rollout_rs_masked_fraction",
    ):
        assert metrics[f"rollout_corr/{name}"] == 0.0
    assert metrics["rollout_corr/rollout_is_mean"] == 1.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)


def test_metrics_equal_their_definitions() -> None:
    work = case()
    metrics = run(
        work, rollout_is="token", rollout_is_threshold=1.1, rollout_rs="token", rollout_rs_threshold=9.0
    ).metrics
    flat = [x for row in ratios(work) for x in row]
    rows = [row for row in ratios(work) if row]
    weights = [min(math.exp(x), 1.1) for x in flat]
    expected = {
        "kl": -sum(flat) / len(flat),
        "k3_kl": sum(math.exp(x) - 1 - x for x in flat) / len(flat),
        "chi2_token": sum(math.exp(2 * x) for x in flat) / len(flat) - 1,
        "chi2_seq": sum(math.exp(2 * sum(row)) for row in rows) / len(rows) - 1,
        "max_abs_log_ratio": max(abs(x) for x in flat),
        "rollout_is_mean": sum(weights) / len(weights),
        "rollout_is_eff_sample_size": sum(weights) ** 2 / sum(w * w for w in weights) / len(weights),
        "rollout_is_ratio_fraction_high": sum(math.exp(x) > 1.1 for x in flat) / len(flat),
    }
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-9), name


def test_perplexities_are_of_rows_and_their_difference_is_trainer_minus_sampler() -> None:
    """Rows of two tokens and one: -log p means 1, 3 (trainer) and 2, 3.5 (sampler); a trainer that is surer than its
    sampler has the lower perplexity, so the difference of the logarithms is negative."""
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    metrics = correct(
        old_log_probs=torch.tensor([[-0.5, -1.5], [-3.0, 9.0]]),
        rollout_log_probs=torch.tensor([[-1.0, -3.0], [-3.5, 9.0]]),
        mask=mask,
        config=correction(),
    ).metrics
    expected = {
        "training_ppl": (math.e + math.e**3) / 2,
        "rollout_ppl": (math.e**2 + math.e**3.5) / 2,
        "log_ppl_diff": ((1 - 2) + (3 - 3.5)) / 2,
        "log_ppl_abs_diff": 0.75,
    }
    assert {name: metrics[f"rollout_corr/{name}"] for name in expected} == pytest.approx(expected)


def test_garbage_at_masked_positions_changes_nothing() -> None:
    """C12: filler log-probs of tool and pad tokens reach no weight, no decision and no metric."""
    settings = dict(rollout_is="token", rollout_rs="seq_max_k3", rollout_rs_threshold="0.1")
    clean, dirty = run(case(), **settings), run(case().poisoned(), **settings)
    assert torch.equal(clean.mask, dirty.mask)
    assert torch.equal(clean.weights, dirty.weights)
    assert clean.metrics == dirty.metrics


@pytest.mark.parametrize("settings", [{}, {"rollout_is": "token"}, {"rollout_is": "sequence", "rollout_rs": "token"}])
def test_an_all_masked_batch_is_survived(settings: dict[str, str]) -> None:
    """A11."""
    work = case()
    empty = Case(**{**work.__dict__, "mask": torch.zeros_like(work.mask)})
    result = run(empty, rollout_is_batch_normalize=True, **settings)
    assert not result.mask.any()
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_the_guard_warns_falls_back_or_stops() -> None:
    work = case()
    settings: dict[str, Any] = dict(rollout_is="token", guard_max_log_ratio=0.01)
    assert run(work, **settings).metrics["rollout_corr/guard_tripped"] == 1.0
    assert run(work, **settings).weights is not None
    fallen = run(work, guard_action="fallback", **settings)
    assert fallen.weights is None
    assert torch.equal(fallen.mask, work.mask)
    with pytest.raises(EngineError, match=r"guard_max_log_ratio=0\.01"):
        run(work, guard_action="stop", **settings)
    calm = run(work, rollout_is="token", guard_action="stop", guard_max_log_ratio=9.0)
    assert calm.metrics["rollout_corr/guard_tripped"] == 0.0


def test_a_nan_log_prob_trips_the_guard() -> None:
    work = case()
    broken = work.rollout_log_probs.clone()
    broken[0, 0] = float("nan")
    with pytest.raises(EngineError):
        correct(
            old_log_probs=work.old_log_probs,
            rollout_log_probs=broken,
            mask=work.mask,
            config=RolloutCorrectionConfig(guard_action="stop", guard_max_log_ratio=9.0),
        )


@pytest.mark.parametrize("level", IS_LEVELS)
def test_weights_of_the_current_policy_carry_no_gradient_either(level: str) -> None:
    """C10, in bypass mode: the log-ratio itself requires grad."""
    work = case()
    log_ratio = work.values.clone().requires_grad_()
    weights = importance_weights(log_ratio=log_ratio, mask=work.mask, config=correction(rollout_is=level))
    assert not weights.requires_grad
