from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.kl import (
    EXP_LIMIT,
    KL_CONTROLLERS,
    KL_KINDS,
    AdaptiveKLController,
    base_kind,
    kl_estimate,
)
from hybridflow.config import choices
from hybridflow.utils.errors import ConfigError
from tests.unit.algorithms.cases import controller

SAMPLED = [kind for kind in choices.KL_TYPES if not kind.startswith("full")]


def estimate(kind: str, log_probs: torch.Tensor, ref: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    return kl_estimate(kind=kind, log_probs=log_probs, ref_log_probs=ref, **more)


def exact(logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) by definition."""
    log_probs = torch.log_softmax(logits, dim=0)
    return (log_probs.exp() * (log_probs - ref)).sum()


def test_names_and_controllers_equal_the_allowed_ones() -> None:
    assert KL_KINDS == choices.KL_TYPES
    assert tuple(KL_CONTROLLERS) == choices.KL_CONTROLLERS


def test_values_for_the_two_action_policy() -> None:
    """C02: policy 0.5, reference 0.25: k1 .6931, k2 .2402, k3 .1931."""
    log_prob, ref = torch.tensor([math.log(0.5)]).double(), torch.tensor([math.log(0.25)]).double()
    expected = {"k1": 0.6931, "abs": 0.6931, "k2": 0.2402, "k3": 0.1931}
    for kind, value in expected.items():
        assert estimate(kind, log_prob, ref).item() == pytest.approx(value, abs=5e-5)
        assert estimate(kind + "+", log_prob, ref).item() == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize(
    ("kind", "gradient"), [("k1", 0.0), ("k2", 0.27465), ("k3", 0.25), ("k1+", 0.27465), ("k3+", 0.27465)]
)
def test_expected_gradients_against_the_true_one(kind: str, gradient: float) -> None:
    """C02: exact expectation over both actions; the gradient of the KL itself is .27465 (= k2, and every + form)."""
    logit = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(torch.cat([logit, torch.zeros(1, dtype=torch.float64)]), dim=0)
    ref = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    (log_probs.exp().detach() * estimate(kind, log_probs, ref)).sum().backward()
    assert logit.grad.item() == pytest.approx(gradient, abs=1e-5)


@pytest.mark.parametrize(("alias", "name"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_aliases_give_identical_numbers(alias: str, name: str) -> None:
    """C04."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 9, generator=generator), torch.randn(2, 9, generator=generator)
    for suffix in ("", "+"):
        assert torch.equal(estimate(alias + suffix, a, b), estimate(name + suffix, a, b))


def test_a_batch_beyond_the_horizon_never_turns_the_sign_of_the_coefficient() -> None:
    """Ziegler's factor 1 - 0.2 sequences / horizon is negative, a reward for leaving, beyond five horizons."""
    adaptive = AdaptiveKLController(controller(type="adaptive", kl_coef=0.1, target_kl=1.0, horizon=100))
    adaptive.update(kl=0.0, sequences=8192)
    assert adaptive.value == pytest.approx(0.08)
    adaptive.update(kl=50.0, sequences=8192)
    assert adaptive.value == pytest.approx(0.096)


@pytest.mark.parametrize("name", ["k4", "", "+", "k3++", "low_var"])
def test_an_unknown_name_raises_and_lists_the_known_ones(name: str) -> None:
    """C04."""
    with pytest.raises(ConfigError, match="low_var_kl"):
        base_kind(name)


def test_the_exact_kind_cannot_be_estimated_from_log_probs() -> None:
    with pytest.raises(ConfigError, match="exact over the vocabulary"):
        estimate("full+", torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("kind", SAMPLED)
def test_the_kl_of_a_policy_with_itself_is_zero(kind: str) -> None:
    log_probs = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    assert estimate(kind, log_probs, log_probs).abs().max().item() == 0.0


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_plain_estimates_pass_gradcheck_and_equal_their_formula(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: estimate(kind, x, ref), (log_probs,))
    for x, found in zip(
        (log_probs - ref).flatten().tolist(), estimate(kind, log_probs, ref).flatten().tolist(), strict=True
    ):
        expected = {"k1": x, "abs": abs(x), "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[kind]
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["k2", "k3", "abs", "k3+"])
@pytest.mark.parametrize("drift", [-1e4, -50.0, 50.0, 1e4])
def test_the_gradient_still_points_back_after_the_largest_drift(kind: str, drift: float) -> None:
    """C03: finite, and of the sign that brings the log-prob back to the reference."""
    log_probs = torch.tensor([drift], requires_grad=True)
    value = estimate(kind, log_probs, torch.zeros(1))
    value.sum().backward()
    assert math.isfinite(value.item())
    assert math.isfinite(log_probs.grad.item())
    assert log_probs.grad.item() * drift > 0


def test_k3_is_smooth_where_its_tangent_begins() -> None:
    x = torch.tensor([-EXP_LIMIT - 1e-6, -EXP_LIMIT + 1e-6], dtype=torch.float64, requires_grad=True)
    estimate("k3", x, torch.zeros(2, dtype=torch.float64)).sum().backward()
    assert x.grad[0].item() == pytest.approx(x.grad[1].item(), rel=1e-5)


def test_log_probs_are_subtracted_in_float32() -> None:
    """C07: -10.03 and -10.0 are one number in bf16; from float32 they differ by 0.03."""
    a, b = torch.tensor([-10.0]), torch.tensor([-10.03])
    assert estimate("k1", a, b).item() == pytest.approx(0.03, abs=1e-5)
    assert estimate("k1", a.bfloat16(), b).dtype == torch.float32


def test_a_step_on_the_kl_term_brings_the_policy_to_the_reference() -> None:
    """C01: one logit above the reference, one SGD step, smaller KL."""
    ref = torch.log_softmax(torch.tensor([0.0, 0.0], dtype=torch.float64), dim=0)
    for delta in (0.7, -0.7):
        logits = torch.tensor([delta, 0.0], dtype=torch.float64, requires_grad=True)
        before = exact(logits, ref)
        log_probs = torch.log_softmax(logits, dim=0)
        (log_probs.exp().detach() * estimate("low_var_kl", log_probs, ref)).sum().backward()
        after = exact(logits - 0.1 * logits.grad, ref)
        assert after.item() < before.item()


def test_importance_weights_make_the_plus_form_right_off_policy() -> None:
    """C02: rows sampled from an older policy q, weight p / q, exact expectation: the gradient of the true KL again."""
    old = torch.tensor([0.3, 0.7], dtype=torch.float64)
    logit = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(torch.cat([logit, torch.zeros(1, dtype=torch.float64)]), dim=0)
    ref = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    weight = log_probs.exp() / old
    (old * estimate("k3+", log_probs, ref, importance=weight)).sum().backward()
    assert logit.grad.item() == pytest.approx(0.27465, abs=1e-5)


def test_the_adaptive_controller_follows_its_formula_and_is_saved() -> None:
    control = AdaptiveKLController(controller(type="adaptive", kl_coef=0.1, target_kl=0.05, horizon=1000))
    control.update(kl=0.055, sequences=100)
    assert control.value == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    control.update(kl=5.0, sequences=100)  # the error is limited to 0.2
    assert control.value == pytest.approx(0.1 * 1.01 * 1.02)
    control.update(kl=float("nan"), sequences=100)
    other = AdaptiveKLController(controller(type="adaptive"))
    other.load_state_dict(control.state_dict())
    assert other.value == control.value


def test_the_fixed_controller_stays() -> None:
    control = KL_CONTROLLERS["fixed"](controller(kl_coef=0.3))
    control.update(kl=9.0, sequences=10)
    assert control.value == 0.3
    assert control.state_dict() == {"value": 0.3}
