from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from hybridflow.algorithms import policy_loss
from hybridflow.algorithms.aggregation import AGGREGATIONS, counts_of
from hybridflow.algorithms.contract import Metric, Outputs
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.losses import ActorLoss, CriticLoss
from hybridflow.algorithms.policy_loss import POLICY_LOSSES
from hybridflow.batch.batch import Batch
from hybridflow.config.choices import POLICY_LOSSES as NAMES
from hybridflow.config.critic import CriticConfig
from hybridflow.utils.errors import ColumnError, ConfigError, EngineError
from tests.unit.algorithms.cases import Case, actor, case, correction, unchecked


def batch_of(work: Case, **more: torch.Tensor) -> Batch:
    """The columns that losses read."""
    return Batch(
        {
            "loss_mask": work.mask,
            "old_log_probs": work.old_log_probs,
            "ref_log_probs": work.ref_log_probs,
            "advantages": work.advantages,
            "values": work.values,
            "returns": work.rewards,
            **more,
        }
    )


def value(metric: Metric) -> float:
    """What an engine makes of one metric of one micro-batch."""
    return float(metric.value) / float(metric.weight) if metric.how == "mean" else float(metric.value)


def run(loss: Any, work: Case, rows: Batch | None = None) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, gradient in the log-probs, and metrics."""
    log_probs = work.log_probs.clone().requires_grad_()
    share, metrics = loss(
        Outputs(log_probs=log_probs, entropy=work.entropy),
        batch_of(work) if rows is None else rows,
        counts_of(work.mask),
    )
    share.backward()
    return share.detach(), log_probs.grad, {name: value(metric) for name, metric in metrics.items()}


def test_the_loss_is_policy_minus_entropy_plus_kl() -> None:
    work = case()
    config = actor(
        entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k2", loss_agg_mode="seq-mean-token-sum"
    )
    share, _, metrics = run(ActorLoss(config, max_response_length=6), work)
    counts = counts_of(work.mask)

    def total(losses: torch.Tensor) -> float:
        mode = AGGREGATIONS["seq-mean-token-sum"]
        return mode(losses=losses, mask=work.mask, counts=counts, scale=6.0).item()

    policy, _ = POLICY_LOSSES["vanilla"](
        log_probs=work.log_probs,
        old_log_probs=work.old_log_probs,
        advantages=work.advantages,
        mask=work.mask,
        config=config,
    )
    kl = kl_estimate(kind="k2", log_probs=work.log_probs, ref_log_probs=work.ref_log_probs)
    assert metrics["actor/pg_loss"] == pytest.approx(total(policy))
    assert metrics["actor/entropy"] == pytest.approx(total(work.entropy))
    assert metrics["actor/kl_loss"] == pytest.approx(total(kl))
    assert share.item() == pytest.approx(total(policy) - 0.3 * total(work.entropy) + 0.2 * total(kl))


def test_the_entropy_bonus_and_the_kl_term_have_the_right_sign() -> None:
    """C01: with advantages 0, one step on the loss raises entropy and lowers the KL to the reference."""
    logits = torch.tensor([[0.9, 0.0, -0.3]], dtype=torch.float64)
    ref = torch.log_softmax(torch.tensor([[0.1, 0.2, 0.0]], dtype=torch.float64), dim=-1)
    mask = torch.ones(1, 1, dtype=torch.bool)

    def kl_to_reference(x: torch.Tensor) -> float:
        log_probs = torch.log_softmax(x, dim=-1)
        return (log_probs.exp() * (log_probs - ref)).sum().item()

    def step(**changes: Any) -> torch.Tensor:
        """Gradient step on the expectation over the sampled token."""
        x = logits.clone().requires_grad_()
        log_probs = torch.log_softmax(x, dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
        loss = ActorLoss(actor(**changes), max_response_length=1)
        total = torch.zeros((), dtype=torch.float64)
        for token in range(3):
            rows = Batch(
                {"loss_mask": mask, "advantages": torch.zeros(1, 1), "ref_log_probs": ref[:, token : token + 1]}
            )
            share, _ = loss(Outputs(log_probs=log_probs[:, token : token + 1], entropy=entropy), rows, counts_of(mask))
            total = total + log_probs[0, token].exp().detach() * share
        total.backward()
        return logits - 0.1 * x.grad

    assert kl_to_reference(step(use_kl_loss=True, kl_loss_coef=1.0)) < kl_to_reference(logits)
    moved, before = torch.softmax(step(entropy_coeff=1.0), -1), torch.softmax(logits, -1)
    assert -(moved * moved.log()).sum() > -(before * before.log()).sum()


def test_without_a_kl_term_no_reference_column_is_needed() -> None:
    """C09, B20: KL in the reward only, or coefficient 0: the loss has no KL term and reads no ref_log_probs."""
    work = case()
    rows = batch_of(work).drop("ref_log_probs")
    plain = run(ActorLoss(actor(), max_response_length=6), work, rows)
    assert torch.equal(plain[0], run(ActorLoss(actor(), max_response_length=6), work)[0])
    assert "actor/kl_loss" not in plain[2]
    with pytest.raises(ColumnError, match="ref_log_probs"):
        run(ActorLoss(actor(use_kl_loss=True), max_response_length=6), work, rows)


def test_the_reported_kl_is_the_negative_log_ratio() -> None:
    """C05: log-ratios [.1, -.1, 0] have mean 0; old equal to new reports 0; [.3, 0, 0] reports -.1."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss = ActorLoss(actor(), max_response_length=3)
    for log_ratios, expected in (([0.1, -0.1, 0.0], 0.0), ([0.0, 0.0, 0.0], 0.0), ([0.3, 0.0, 0.0], -0.1)):
        rows = Batch({"loss_mask": mask, "advantages": torch.ones(1, 3), "old_log_probs": torch.full((1, 3), -1.0)})
        _, metrics = loss(Outputs(log_probs=-1.0 + torch.tensor([log_ratios])), rows, counts_of(mask))
        assert value(metrics["actor/ppo_kl"]) == pytest.approx(expected, abs=1e-7)


def test_without_old_log_probs_the_current_ones_serve() -> None:
    """On policy, one mini-batch: ratio exactly 1, plain policy gradient."""
    work = case()
    share, gradient, metrics = run(
        ActorLoss(actor(), max_response_length=6), work, batch_of(work).drop("old_log_probs")
    )
    expected = torch.where(work.mask, -work.advantages, 0.0) / work.mask.sum()
    torch.testing.assert_close(gradient, expected)
    assert share.item() == pytest.approx(expected.sum().item())
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_correction_weights_scale_each_tokens_gradient() -> None:
    """C10."""
    work = case()
    weights = torch.where(work.mask, work.entropy, 0.0)
    plain = run(ActorLoss(actor(), max_response_length=6), work)[1]
    weighted = run(ActorLoss(actor(), max_response_length=6), work, batch_of(work, correction_weights=weights))[1]
    torch.testing.assert_close(weighted, plain * weights)


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum"])
def test_sequence_losses_average_rows_whatever_is_configured(name: str, mode: str) -> None:
    """A17."""
    work = case()
    configured = run(ActorLoss(actor(name, loss_agg_mode=mode), max_response_length=6), work)[0]
    rows = run(ActorLoss(actor(name, loss_agg_mode="seq-mean-token-mean"), max_response_length=6), work)[0]
    assert torch.equal(configured, rows)


def test_the_divisor_of_the_norm_mode_is_the_given_one_or_the_length_limit() -> None:
    work = case()
    mode = "seq-mean-token-sum-norm"
    by_limit = run(ActorLoss(actor(loss_agg_mode=mode), max_response_length=8), work)[0]
    given = run(ActorLoss(actor(loss_agg_mode=mode, loss_scale_factor=2.0), max_response_length=8), work)[0]
    plain = run(ActorLoss(actor(loss_agg_mode="seq-mean-token-sum"), max_response_length=8), work)[0]
    assert by_limit.item() == pytest.approx(plain.item() / 8)
    assert given.item() == pytest.approx(plain.item() / 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_survives_pickling_and_gives_the_same_numbers(name: str) -> None:
    work = case()
    rows = batch_of(work, covariance_selected=work.mask & (work.entropy > 1))
    loss = ActorLoss(actor(name, use_kl_loss=True, kl_loss_type="k3+", entropy_coeff=0.1), max_response_length=6)
    one, other = run(loss, work, rows), run(pickle.loads(pickle.dumps(loss)), work, rows)
    assert torch.equal(one[0], other[0])
    assert one[2] == other[2]
    assert loss.needs == {"log_probs", "entropy"}


@pytest.mark.parametrize("name", NAMES)
def test_an_all_masked_micro_batch_gives_zero_and_a_zero_gradient(name: str) -> None:
    """A11: the rank still has a graph to run backward on."""
    work = case()
    empty = Case(**{**work.poisoned().__dict__, "mask": torch.zeros_like(work.mask)})
    rows = batch_of(empty, covariance_selected=empty.mask)
    loss = ActorLoss(actor(name, use_kl_loss=True, entropy_coeff=0.1), max_response_length=6)
    log_probs = empty.log_probs.clone().requires_grad_()
    share, _ = loss(Outputs(log_probs=log_probs, entropy=empty.entropy), rows, counts_of(work.mask))
    share.backward()
    assert share.item() == 0.0
    assert log_probs.grad.abs().max().item() == 0.0


def test_a_users_own_loss_by_dotted_path() -> None:
    work = case()
    config = actor("hybridflow.algorithms.policy_loss:sapo")
    assert torch.equal(
        run(ActorLoss(config, max_response_length=6), work)[0],
        run(ActorLoss(actor("sapo"), max_response_length=6), work)[0],
    )


SHAPES: dict[str, tuple[Any, str]] = {
    "a mean": (lambda losses: (losses.mean(), {}), r"losses of shape \(\)"),
    "a number per row": (lambda losses: (losses.sum(1, keepdim=True), {}), r"losses of shape \(8, 1\)"),
    "no measures": (lambda losses: losses, "it returned Tensor"),
    "what verl's return": (lambda losses: (losses.mean(), 0.1, 0.2, 0.0), r"\(Tensor, float, float, float\)"),
    "a measure that is a mean": (lambda losses: (losses, {"own/x": losses.mean()}), r"own/x of shape \(\)"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_users_loss_that_is_reduced_already_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean would be broadcast over the tokens: in value right, in gradient divided twice by what a cut decides."""
    returned, words = SHAPES[kind]
    own = lambda *, log_probs, mask, **columns: returned(torch.where(mask, -log_probs, 0.0))  # noqa: E731
    monkeypatch.setattr(policy_loss, "own", own, raising=False)
    loss = ActorLoss(actor("hybridflow.algorithms.policy_loss:own"), max_response_length=6)
    with pytest.raises(ConfigError, match=rf"must return \(losses, measures\).*\(8, 6\).*{words}"):
        run(loss, case())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_agg_mode": "token_mean"}, "seq-mean-token-sum-norm"),
        ({"kl_loss_type": "k9", "use_kl_loss": True}, "low_var_kl"),
    ],
)
def test_a_wrong_option_is_found_when_the_loss_is_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ActorLoss(unchecked(actor(), **changes), max_response_length=6)
    bad = unchecked(actor(), policy_loss=unchecked(actor().policy_loss, loss_mode="vanila"))
    with pytest.raises(ConfigError, match="vanilla"):
        ActorLoss(bad, max_response_length=6)
    with pytest.raises(ConfigError, match="loss_agg_mode"):
        CriticLoss(unchecked(CriticConfig(), loss_agg_mode="mean"))


def test_the_exact_kl_comes_from_the_engine() -> None:
    """kl_loss_type=full takes value and gradient of Outputs.full_kl; full+ its value and the gradient of k2."""
    work = case()
    exact = work.entropy.clone().requires_grad_()
    for kind in ("full", "full+"):
        loss = ActorLoss(actor(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind), max_response_length=6)
        assert loss.needs == {"log_probs", "full_kl"}
        rows = batch_of(work, advantages=torch.zeros_like(work.values))
        log_probs = work.log_probs.clone().requires_grad_()
        share, _ = loss(Outputs(log_probs=log_probs, full_kl=exact), rows, counts_of(work.mask))
        share.backward()
        assert share.item() == pytest.approx(work.entropy[work.mask].mean().item())
        assert bool(log_probs.grad.abs().max() > 0) == (kind == "full+")
    torch.testing.assert_close(exact.grad, work.mask.double() / work.mask.sum())
    with pytest.raises(EngineError, match="full_kl"):
        loss(Outputs(log_probs=work.log_probs), batch_of(work), counts_of(work.mask))


def test_an_output_that_the_engine_left_out_is_named() -> None:
    work = case()
    with pytest.raises(EngineError, match="log_probs"):
        ActorLoss(actor(), max_response_length=6)(Outputs(), batch_of(work), counts_of(work.mask))
    with pytest.raises(EngineError, match="values"):
        CriticLoss(CriticConfig())(Outputs(), batch_of(work), counts_of(work.mask))


def test_bypass_with_reinforce_weighs_by_current_over_sampler() -> None:
    """-A w log pi with w = min(current / rollout, threshold) and no gradient through w."""
    work = case()
    rule = correction(bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.1)
    _, gradient, metrics = run(ActorLoss(actor(), max_response_length=6, correction=rule), work)
    weight = (work.log_probs - work.old_log_probs).exp().clamp(max=1.1)
    expected = torch.where(work.mask, -work.advantages * weight, 0.0) / work.mask.sum()
    torch.testing.assert_close(gradient, expected)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(weight[work.mask].mean().item())


def test_the_mean_weight_of_bypass_is_that_of_the_tokens_that_are_left() -> None:
    """As where old log-probs are recomputed: rejected tokens are in no mean."""
    work = case()
    rule = correction(
        bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_rs="token", rollout_rs_threshold=1.2
    )
    _, gradient, metrics = run(ActorLoss(actor(), max_response_length=6, correction=rule), work)
    ratio = (work.log_probs - work.old_log_probs).exp()
    left = work.mask & (ratio <= 1.2) & (ratio >= 1 / 1.2)
    assert left.any() and not torch.equal(left, work.mask)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(ratio[left].mean().item())
    torch.testing.assert_close(gradient, torch.where(left, -work.advantages * ratio, 0.0) / work.mask.sum())


def test_bypass_with_clipping_uses_no_weights_and_drops_rejected_tokens() -> None:
    work = case()
    rule = correction(bypass_mode=True, rollout_is="token", rollout_rs="token", rollout_rs_threshold=1.2)
    _, gradient, metrics = run(ActorLoss(actor(), max_response_length=6, correction=rule), work)
    plain = run(ActorLoss(actor(), max_response_length=6), work)[1]
    outside = (work.log_probs - work.old_log_probs).abs() > torch.tensor(1.2).double().log()
    assert (outside & work.mask).any()
    torch.testing.assert_close(gradient, torch.where(outside, 0.0, plain))
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        outside[work.mask].double().mean().item()
    )


def test_bypass_with_batch_normalised_weights_is_refused() -> None:
    rule = correction(bypass_mode=True, loss_type="reinforce", rollout_is_batch_normalize=True)
    with pytest.raises(ConfigError, match="rollout_is_batch_normalize"):
        ActorLoss(actor(), max_response_length=6, correction=rule)


def test_without_bypass_the_correction_argument_changes_nothing() -> None:
    work = case()
    rule = correction(rollout_is="token", rollout_rs="token")
    one = run(ActorLoss(actor(), max_response_length=6, correction=rule), work)
    other = run(ActorLoss(actor(), max_response_length=6), work)
    assert torch.equal(one[1], other[1])


def test_the_critic_loss_and_its_metrics() -> None:
    """A05."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    rows = Batch({"loss_mask": mask, "values": torch.full((1, 2), 0.5), "returns": torch.tensor([[0.0, 1.0]])})
    share, metrics = CriticLoss(CriticConfig(cliprange_value=0.2))(
        Outputs(values=torch.tensor([[1.0, 0.0]])), rows, counts_of(mask)
    )
    assert share.item() == 0.5
    assert {name: value(metric) for name, metric in metrics.items()} == {
        "critic/vf_loss": 0.5,
        "critic/vf_clipfrac": 0.0,
        "critic/vpred_mean": 0.5,
    }


def test_the_critics_norm_mode_wants_its_divisor() -> None:
    config = CriticConfig(loss_agg_mode="seq-mean-token-sum-norm")
    with pytest.raises(ConfigError, match="length limit"):
        CriticLoss(config)
    CriticLoss(config, max_response_length=4)


def test_half_precision_outputs_are_widened_before_anything_is_subtracted() -> None:
    """C07."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    rows = Batch({"loss_mask": mask, "old_log_probs": torch.tensor([[-10.03]]), "advantages": torch.ones(1, 1)})
    share, metrics = ActorLoss(actor(), max_response_length=1)(
        Outputs(log_probs=torch.tensor([[-10.0]]).bfloat16()), rows, counts_of(mask)
    )
    assert share.dtype == torch.float32
    assert value(metrics["actor/ppo_kl"]) == pytest.approx(-0.03, abs=1e-5)
