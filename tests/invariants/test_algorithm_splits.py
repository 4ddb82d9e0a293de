"""The sum contract: loss, gradient and logged numbers do not depend on how a mini-batch is cut or padded.

A loss returns its share of the whole mini-batch (divided by *global* counts): the shares of any micro-batches add up.
Everything is float64: the tolerance is that of sums in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from hybridflow.algorithms.aggregation import counts_of
from hybridflow.algorithms.contract import Counts, Loss, Metric, Outputs
from hybridflow.algorithms.losses import ActorLoss, CriticLoss
from hybridflow.batch.batch import Batch
from hybridflow.config.choices import KL_TYPES, LOSS_AGG_MODES, POLICY_LOSSES
from hybridflow.config.critic import CriticConfig
from tests.unit.algorithms.cases import actor, case, correction

ROWS, WIDTH, HIDDEN, VOCABULARY = 8, 6, 5, 7
SPLITS: dict[str, list[list[int]]] = {
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "quarters": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "single rows": [[i] for i in range(ROWS)],
    "uneven and shuffled": [[6], [3], [0, 5, 1], [7, 2, 4]],  # the second micro-batch is all masked
}


class TinyPolicy(torch.nn.Module):
    """Hidden states of a batch to log-probs, entropy and values of its response tokens."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.head = torch.nn.Parameter(torch.randn(HIDDEN, VOCABULARY, generator=generator, dtype=torch.float64) * 0.3)
        self.value = torch.nn.Parameter(torch.randn(HIDDEN, generator=generator, dtype=torch.float64))

    def forward(self, rows: Batch) -> Outputs:
        hidden, reference = rows["hidden"], rows["reference"]
        log_probs = torch.log_softmax(hidden @ self.head, dim=-1)
        share = log_probs.exp()
        return Outputs(
            log_probs=log_probs.gather(-1, rows["ids"][..., None])[..., 0],
            entropy=-(share * log_probs).sum(-1),
            values=hidden @ self.value,
            full_kl=(share * (log_probs - reference)).sum(-1),
        )


def mini_batch() -> Batch:
    work = case()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, WIDTH, HIDDEN, generator=generator, dtype=torch.float64)
    reference = torch.log_softmax(torch.randn(ROWS, WIDTH, VOCABULARY, generator=generator, dtype=torch.float64), -1)
    ids = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator)
    rows = Batch({"hidden": hidden, "reference": reference, "ids": ids})
    current = TinyPolicy()(rows)
    assert current.log_probs is not None
    assert current.values is not None
    noise = 0.3 * work.advantages.roll(1, 0)
    return rows.with_columns(
        loss_mask=work.mask,
        old_log_probs=(current.log_probs + noise).detach(),
        ref_log_probs=reference.gather(-1, ids[..., None])[..., 0],
        advantages=work.advantages,
        values=(current.values + noise).detach(),
        returns=work.rewards,
        covariance_selected=work.mask & (work.entropy > 1),
        correction_weights=torch.where(work.mask, work.entropy.clamp(max=2.0), 0.0),
    )


def combined(parts: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Metrics of all micro-batches, as an engine adds them."""
    out = {}
    for name in parts[0]:
        metrics = [part[name] for part in parts]
        total = sum(float(metric.value) for metric in metrics)
        weight = sum(float(metric.weight) for metric in metrics)
        out[name] = total / weight if metrics[0].how == "mean" else total
    return out


def outcome(loss: Loss, blocks: Sequence[Batch], counts: Counts) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient of all parameters, and metrics, accumulated over micro-batches."""
    policy, total, parts = TinyPolicy(), 0.0, []
    for block in blocks:
        share, metrics = loss(policy(block), block, counts)
        share.backward()
        total += share.item()
        parts.append(metrics)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return total, torch.cat([gradient.flatten() for gradient in gradients]), combined(parts)


def assert_equal(one: Any, other: Any) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-11, abs=1e-13)
    torch.testing.assert_close(one[1], other[1], rtol=1e-10, atol=1e-13)
    assert one[2] == pytest.approx(other[2], rel=1e-11, abs=1e-13)


def cuts(batch: Batch) -> dict[str, list[Batch]]:
    """The mini-batch cut in every way, and padded in two."""
    found = {name: [batch.rows(index) for index in split] for name, split in SPLITS.items()}
    wide = {
        name: torch.cat([value, value.new_zeros(ROWS, 3, *value.shape[2:])], dim=1)
        for name, value in batch.tensors().items()
    }
    found["wider padding"] = [Batch(wide)]
    found["narrow blocks"] = [batch.rows([1]), batch.rows([0, 2, 3, 4, 5, 6, 7])]
    narrow = {name: value[:, :5] for name, value in found["narrow blocks"][0].tensors().items()}
    found["narrow blocks"][0] = Batch(narrow)
    extra = batch.rows([0, 0]).with_columns(loss_mask=torch.zeros(2, WIDTH, dtype=torch.bool))
    found["pad rows"] = [batch, extra]
    return found


def assert_any_cut_is_the_whole(loss: Loss) -> None:
    batch = mini_batch()
    counts = counts_of(batch["loss_mask"])
    whole = outcome(loss, [batch], counts)
    assert whole[1].abs().max() > 0
    for blocks in cuts(batch).values():
        assert_equal(outcome(loss, blocks, counts), whole)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_any_cut_of_a_mini_batch_gives_the_same_policy_update(name: str, mode: str) -> None:
    """A01, A02, A09, A10, A11, A16, A17: every loss, aggregation, cut and padding; logged numbers too."""
    config = actor(name, loss_agg_mode=mode, entropy_coeff=0.1, use_kl_loss=True, policy={"dppo_threshold": 0.02})
    assert_any_cut_is_the_whole(ActorLoss(config, max_response_length=10))


@pytest.mark.parametrize("kind", KL_TYPES)
def test_any_cut_of_a_mini_batch_gives_the_same_kl_term(kind: str) -> None:
    """A10, A16: the logged KL is that of the mini-batch, not of its last micro-batch."""
    config = actor(use_kl_loss=True, kl_loss_type=kind, kl_loss_coef=0.5)
    assert_any_cut_is_the_whole(ActorLoss(config, max_response_length=10))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_any_cut_of_a_mini_batch_gives_the_same_critic_update(mode: str) -> None:
    """A01, A05."""
    assert_any_cut_is_the_whole(CriticLoss(CriticConfig(loss_agg_mode=mode), max_response_length=10))


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_any_cut_of_a_mini_batch_gives_the_same_bypass_update(loss_type: str) -> None:
    rule = correction(
        bypass_mode=True, loss_type=loss_type, rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold=1.3
    )
    assert_any_cut_is_the_whole(ActorLoss(actor(), max_response_length=10, correction=rule))


def test_averaging_micro_batches_would_be_seen_here() -> None:
    """Negative control: counts of the micro-batch in place of the mini-batch's (fault A01) change the loss."""
    batch, loss = mini_batch(), ActorLoss(actor(), max_response_length=10)
    whole = outcome(loss, [batch], counts_of(batch["loss_mask"]))[0]
    halves = [batch.rows(index) for index in SPLITS["halves"]]
    averaged = sum(outcome(loss, [half], counts_of(half["loss_mask"]))[0] for half in halves) / 2
    assert abs(averaged - whole) > 1e-3
