"""Every loss gives one update: a mini-batch cut into 1, 2 and 4 micro-batches, over 1 and 2 gloo ranks.

The real engine with the real losses: loss, gradient and every logged number (A01, A02, A09, A10, A11, A17). Of the rows
one has no response and one has all its tokens masked, and the ranks get uneven shares of tokens. float32: sums in
another order differ in the sixth digit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.algorithms.contract import Loss
from hybridflow.algorithms.losses import ActorLoss, CriticLoss
from hybridflow.batch.balance import micro_batches
from hybridflow.batch.batch import Batch
from hybridflow.config.choices import LOSS_AGG_MODES, POLICY_LOSSES
from hybridflow.config.critic import CriticConfig
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.topology.parallel import ParallelDims
from tests.invariants.training_steps import Case, add_value_head, assemble, blocks, build, make_rows, own_rows
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model
from tests.unit.algorithms.cases import actor, correction

ROWS, SPLITS = 8, (1, 2, 4)
Found = dict[str, dict[int, tuple[dict[str, float], dict[str, Any]]]]
"""By loss and number of micro-batches: metrics, and this rank's blocks of the gradient."""


def losses(head: str) -> dict[str, Loss]:
    """All policy losses, aggregations, KL types and bypass forms; all aggregations of the critic."""
    if head == "value":
        return {mode: CriticLoss(CriticConfig(loss_agg_mode=mode), max_response_length=10) for mode in LOSS_AGG_MODES}
    rule = correction(bypass_mode=True, rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold=1.3)
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    found = {name: actor(name, entropy_coeff=0.1, policy={"dppo_threshold": 0.02}) for name in POLICY_LOSSES}
    found |= {mode: actor(loss_agg_mode=mode, entropy_coeff=0.1, **kl) for mode in LOSS_AGG_MODES}
    kinds = [name + plus for name in ("k1", "abs", "k2", "k3", "full") for plus in ("", "+")]
    found |= {f"KL {kind}": actor(kl_loss_type=kind, **kl) for kind in kinds}
    made: dict[str, Loss] = {name: ActorLoss(config, max_response_length=10) for name, config in found.items()}
    for kind in ("ppo_clip", "reinforce"):
        made[f"bypass {kind}"] = ActorLoss(actor(), max_response_length=10, correction=replace(rule, loss_type=kind))
    return made


def columns(rows: Batch) -> Batch:
    """``make_rows`` with what losses read beside it; old log-probs follow from the model (``near``)."""
    g = torch.Generator().manual_seed(11)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows["loss_mask"].shape, generator=g)

    return rows.with_columns(
        values=noise(0.3),
        shift=noise(0.2),
        reference_shift=noise(0.4),
        covariance_selected=rows["loss_mask"] & (noise(1.0) > 0.5),
        correction_weights=noise(0.3).exp().clamp(max=2.0),
    )


def near(engine: FSDPEngine, rows: Batch) -> Batch:
    """Old, sampler's and reference log-probs around the model's own, so that clips bind for some tokens only."""
    micro = MicroBatching(max_rows=1)
    own = engine.forward(rows, frozenset({"log_probs"}), temperature=0.7, micro=micro)["log_probs"]
    old = own + rows["shift"]
    return rows.with_columns(old_log_probs=old, rollout_log_probs=old, ref_log_probs=own + rows["reference_shift"])


def updates(case: Case, reference: str) -> Found:
    """One update for every loss and split from the same weights. SGD of rate 1: the change is minus the gradient."""
    engine = build(case)
    rows = own_rows(columns(make_rows(ROWS)), case.dims, dist.get_rank() if dist.is_initialized() else 0)
    if case.head == "lm":
        rows = near(engine, rows)
        engine.compare_with(
            FSDPEngine(model=ModelConfig(path=reference), head="lm", sharding=FSDPConfig(), dims=case.dims, optim=None)
        )
    start = [shard.local.clone() for shard in engine.shards()]
    counts, found = engine.counts(rows), {}
    for name, loss in losses(case.head).items():
        for split in SPLITS:
            micro = MicroBatching(max_rows=len(rows) // split)
            metrics = engine.update(rows, loss, temperature=0.7, micro=micro, counts=counts)
            after = blocks(engine)
            gradient = {
                key: (box, shape, before - value)
                for (key, (box, shape, value)), before in zip(after.items(), start, strict=True)
            }
            found.setdefault(name, {})[split] = (metrics, gradient)
            for shard, before in zip(engine.shards(), start, strict=True):
                shard.local.copy_(before)
    return found


@pytest.mark.parametrize("head", ["lm", "value"])
def test_every_loss_gives_one_update_over_splits_and_ranks(tmp_path, head: str) -> None:
    policy = str(save_tiny_model(tmp_path / "policy"))
    reference = str(save_tiny_model(tmp_path / "reference", seed=5))
    add_value_head(policy)
    case = Case(policy, head=head)
    one = [updates(case, reference)]
    two = run_ranks(2, updates, replace(case, dims=ParallelDims(dp_shard=2)), reference)
    assert len(one[0]) == len(losses(head))
    for name in one[0]:
        expected, blocks_of = one[0][name][1]
        want = assemble([blocks_of])
        assert expected["grad/skipped"] == 0.0
        assert float(max(value.abs().max() for value in want.values())) > 1e-4, name
        for ranks in (one, two):
            for split in SPLITS:
                where = f"{name}: {split} micro-batches on {len(ranks)} ranks"
                for rank in ranks:
                    metrics = rank[name][split][0]
                    assert metrics == pytest.approx(expected, rel=1e-4, abs=2e-6), where
                got = assemble([rank[name][split][1] for rank in ranks])
                for key, value in want.items():
                    close = torch.allclose(got[key], value, rtol=1e-4, atol=2e-6)
                    assert close, f"{where}, {key}: {float((got[key] - value).abs().max())}"


def rows_of_lengths(lengths: tuple[int, ...]) -> Batch:
    """Rows of a prompt of one token and so many response tokens, all of them trained."""
    rows = columns(make_rows(len(lengths), width=max(lengths)))
    length = torch.tensor(lengths)
    return rows.with_columns(
        prompt_length=torch.ones(len(lengths), dtype=torch.long),
        response_length=length,
        loss_mask=torch.arange(max(lengths))[None] < length[:, None],
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_token_budget_that_cuts_rows_unevenly_gives_the_update_of_the_whole(tmp_path, mode: str) -> None:
    """A02: rows of 2, 2 and 8 tokens (prompts included) under a budget of 8: micro-batches of two rows and of one."""
    case = Case(str(save_tiny_model(tmp_path)))
    rows = rows_of_lengths((1, 1, 7))
    assert sorted(map(sorted, micro_batches([2, 2, 8], max_tokens=8))) == [[0, 1], [2]]
    loss, found = ActorLoss(actor(loss_agg_mode=mode, entropy_coeff=0.1), max_response_length=10), []
    for micro in (MicroBatching(max_tokens=8), MicroBatching(max_tokens=100)):
        engine = build(case)
        metrics = engine.update(rows, loss, temperature=0.7, micro=micro, counts=engine.counts(rows))
        found.append((metrics, assemble([blocks(engine)])))
    (metrics, weights), (expected, want) = found
    assert metrics == pytest.approx(expected, rel=1e-4, abs=2e-6)
    assert all(torch.allclose(weights[name], value, rtol=1e-4, atol=2e-6) for name, value in want.items())


def uneven(case: Case, lengths: tuple[int, ...], masked_from: int) -> tuple[dict[str, float], dict[str, Any]]:
    """An update over rows of ``lengths`` response tokens, half of them on each of two ranks, and the weights after."""
    rows = rows_of_lengths(lengths)
    trained = rows["loss_mask"].clone()
    trained[masked_from:] = False
    rows = rows.with_columns(loss_mask=trained)
    half, rank = ROWS // 2, dist.get_rank() if dist.is_initialized() else 0
    mine = rows if case.dims.dp == 1 else rows.rows(slice(half * rank, half * (rank + 1)))
    engine = build(case)
    loss = ActorLoss(actor(entropy_coeff=0.1), max_response_length=10)
    micro = MicroBatching(max_tokens=8)
    metrics = engine.update(mine, loss, temperature=0.7, micro=micro, counts=engine.counts(mine))
    return metrics, blocks(engine)


@pytest.mark.parametrize("masked_from", [ROWS, ROWS // 2], ids=["all trained", "one rank all masked"])
def test_ranks_with_long_and_short_rows_run_equally_many_rounds(tmp_path, masked_from: int) -> None:
    """F06: rows of one token on one rank and of eight on the other, budget 8; and a rank without a token to train."""
    case = Case(str(save_tiny_model(tmp_path)))
    lengths = (1,) * 4 + (8,) * 4
    metrics, weights = uneven(case, lengths, masked_from)
    ranks = run_ranks(2, uneven, replace(case, dims=ParallelDims(dp_shard=2)), lengths, masked_from, deadline_s=30.0)
    for found, _ in ranks:
        assert found == pytest.approx(metrics, rel=1e-4, abs=2e-6)
    want, got = assemble([weights]), assemble([own for _, own in ranks])
    assert all(torch.allclose(got[name], value, rtol=1e-4, atol=2e-6) for name, value in want.items())
