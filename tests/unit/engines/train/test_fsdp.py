"""FSDPEngine: forward, guards, schedule, precision, metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.algorithms.contract import Counts, Metric, Outputs
from hybridflow.batch.batch import Batch
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.engines.train.optimizer import clip, gradient_norm
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError, EngineError
from tests.invariants.training_steps import (
    LOSSES,
    ActorLoss,
    Case,
    add_value_head,
    assemble,
    blocks,
    build,
    make_rows,
    own_rows,
    reference_model,
    reference_outputs,
    steps,
)
from tests.ranks import RankError, run_ranks
from tests.tiny import save_tiny_model

LM = frozenset({"log_probs", "entropy"})
BUDGET = MicroBatching(max_tokens=40)
ADAM = {"optimizer": "AdamW", "lr": 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(save_tiny_model(tmp_path_factory.mktemp("model")))
    add_value_head(path)
    return path


def forward(case: Case, temperature: float) -> dict[str, torch.Tensor]:
    engine = build(case)
    rows = own_rows(make_rows(case.rows), case.dims, dist.get_rank() if dist.is_initialized() else 0)
    needs = LM if case.head == "lm" else frozenset({"values"})
    return engine.forward(rows, needs, temperature=temperature, micro=case.micro)


@pytest.mark.parametrize("micro", [BUDGET, MicroBatching(max_rows=1), MicroBatching(max_tokens=1)])
def test_forward_equals_the_reference_row_by_row(folder: str, micro: MicroBatching) -> None:
    rows = make_rows(8)
    with torch.no_grad():
        want = reference_outputs(*reference_model(folder, "lm"), rows, 0.7)
    got = forward(Case(folder, micro=micro), 0.7)
    for name in LM:
        torch.testing.assert_close(got[name], want[name], atol=2e-6, rtol=0)


def test_forward_over_ranks_keeps_the_row_order(folder: str) -> None:
    want = forward(Case(folder), 0.7)
    dims = ParallelDims(dp_shard=2)
    ranks = run_ranks(2, forward, Case(folder, dims=dims), 0.7)
    for rank, got in enumerate(ranks):
        mine = own_rows(Batch(want), dims, rank)
        for name in LM:
            torch.testing.assert_close(got[name], mine[name], atol=2e-6, rtol=0)


def test_values_do_not_know_the_temperature(folder: str) -> None:
    case = Case(folder, head="value")
    assert torch.equal(forward(case, 0.5)["values"], forward(case, 1.0)["values"])


def test_garbage_beyond_a_row_changes_nothing(folder: str) -> None:
    engine = build(Case(folder))
    rows = make_rows(6)
    at = torch.arange(rows["response_ids"].shape[1])[None]
    junk = torch.where(at < rows["response_length"][:, None], rows["response_ids"], torch.full_like(at, 53))
    one, two = (
        engine.forward(batch, LM, temperature=1.0, micro=BUDGET)
        for batch in (rows, rows.with_columns(response_ids=junk))
    )
    assert torch.equal(one["log_probs"], two["log_probs"])


def test_a_new_value_head_predicts_zero(tmp_path: Path) -> None:
    values = forward(Case(str(save_tiny_model(tmp_path)), head="value"), 1.0)["values"]
    assert float(values.abs().max()) == 0.0


class Poisoned(ActorLoss):
    """A loss that is not a number on rank 0."""

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[torch.Tensor, dict[str, Metric]]:
        loss, metrics = super().__call__(outputs, rows, counts)
        bad = not dist.is_initialized() or dist.get_rank() == 0
        return loss * (math.nan if bad else 1.0), metrics


def poisoned_then_clean(case: Case) -> dict[str, Any]:
    engine = build(case)
    rows = own_rows(make_rows(case.rows), case.dims, dist.get_rank() if dist.is_initialized() else 0)
    counts = engine.counts(rows)
    common = dict(temperature=1.0, micro=case.micro, counts=counts)
    engine.update(rows, LOSSES["lm"], **common)
    before = blocks(engine)
    moments = {k: v.clone() for state in engine._optimizer.state.values() for k, v in state.items()}
    skipped = engine.update(rows, Poisoned(), **common)
    after = blocks(engine)
    later = {k: v.clone() for state in engine._optimizer.state.values() for k, v in state.items()}
    again = engine.update(rows, LOSSES["lm"], **common)
    same = all(torch.equal(before[name][2], after[name][2]) for name in before)
    calm = all(
        torch.equal(*(v.to_local() if hasattr(v, "to_local") else v for v in (moments[k], later[k]))) for k in moments
    )
    return {"skipped": skipped["grad/skipped"], "same": same and calm, "again": again["grad/skipped"]}


@pytest.mark.parametrize("world", [1, 2])
def test_a_non_finite_loss_skips_the_step_on_all_ranks_and_harms_nothing(folder: str, world: int) -> None:
    case = Case(folder, dims=ParallelDims(dp_shard=world), optim=ADAM)
    results = run_ranks(world, poisoned_then_clean, case)
    assert results == [{"skipped": 1.0, "same": True, "again": 0.0}] * world


def test_a_mini_batch_without_a_trainable_token_moves_nothing(folder: str) -> None:
    engine = build(Case(folder, optim=ADAM))
    rows = make_rows(4)
    rows = rows.with_columns(loss_mask=torch.zeros_like(rows["loss_mask"]))
    before = blocks(engine)
    counts = Counts(tokens=0, sequences=0, rows=4)
    metrics = engine.update(rows, _Safe(), temperature=1.0, micro=BUDGET, counts=counts)
    after = blocks(engine)
    assert metrics["grad/skipped"] == 1.0
    assert all(torch.equal(before[name][2], after[name][2]) for name in before)


class _Safe(ActorLoss):
    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[torch.Tensor, dict[str, Metric]]:
        return super().__call__(outputs, rows, replace(counts, tokens=max(1, counts.tokens)))


@pytest.mark.parametrize("world", [1, 2])
def test_clipping_scales_the_whole_gradient_to_the_limit(folder: str, world: int) -> None:
    dims = ParallelDims(dp_shard=world)
    case = Case(folder, dims=dims, engine={"grad_clip": 0.25})
    ranks = run_ranks(world, steps, case)
    before, after = (assemble([rank[when] for rank in ranks]) for when in ("before", "after"))
    moved = torch.stack([(before[name] - after[name]).norm() for name in before]).norm()
    assert ranks[0]["metrics"][0]["grad/norm"] > 0.5
    assert float(moved) == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_reaches_the_gradients_themselves_in_every_dtype(dtype: torch.dtype) -> None:
    """A18: gradient [3, 4] has norm 5 and becomes [.6, .8] in place; 3 digits are what bf16 has."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=dtype)
    norm = gradient_norm([parameter])
    clip([parameter], norm, 1.0)
    assert float(norm) == pytest.approx(5.0, rel=1e-2)
    assert parameter.grad.dtype == dtype
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-2)


def test_three_adamw_steps_agree_between_one_and_two_ranks(folder: str) -> None:
    one = steps(Case(folder, optim=ADAM, steps=3, engine={"grad_clip": 1.0}))
    two = run_ranks(
        2, steps, Case(folder, optim=ADAM, steps=3, engine={"grad_clip": 1.0}, dims=ParallelDims(dp_shard=2))
    )
    want, got = assemble([one["after"]]), assemble([rank["after"] for rank in two])
    for name in want:
        # Adam divides by the root of tiny second moments: rounding of a gradient near 0 can turn its sign.
        torch.testing.assert_close(got[name], want[name], atol=2e-3, rtol=0)
        assert float((got[name] - want[name]).abs().mean()) < 1e-5
    assert two[0]["metrics"][2]["loss"] == pytest.approx(one["metrics"][2]["loss"], abs=1e-5)


def test_norms_and_biases_get_no_weight_decay(folder: str) -> None:
    engine = build(Case(folder, optim={**ADAM, "weight_decay": 0.3}))
    decayed, spared = engine._optimizer.param_groups
    assert decayed["weight_decay"] == 0.3
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert spared["weight_decay"] == 0.0
    assert {parameter.ndim for parameter in spared["params"]} == {1}


def test_the_rate_follows_schedule_steps_and_nothing_else(folder: str) -> None:
    optim = {**ADAM, "lr": 1.0e-3, "lr_warmup_steps": 2, "lr_scheduler_type": "linear"}
    engine = build(Case(folder, optim=optim, engine={"total_steps": 6}))
    rows = make_rows(4)
    counts = engine.counts(rows)
    update = dict(temperature=1.0, micro=BUDGET, counts=counts)
    assert engine.update(rows, LOSSES["lm"], **update)["lr"] == 0.0
    assert engine.update(rows, LOSSES["lm"], **update)["lr"] == 0.0
    assert engine.schedule_step() == pytest.approx(0.5e-3)
    assert engine.update(rows, LOSSES["lm"], **update)["lr"] == pytest.approx(0.5e-3)
    engine.forward(rows, LM, temperature=1.0, micro=BUDGET)
    assert [engine.schedule_step() for _ in range(5)] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0.0])


def test_a_frozen_engine_refuses_updates(folder: str) -> None:
    engine = FSDPEngine(
        model=ModelConfig(path=folder), head="lm", sharding=FSDPConfig(), dims=ParallelDims(), optim=None
    )
    rows = make_rows(2)
    with pytest.raises(EngineError, match="frozen"):
        engine.update(rows, LOSSES["lm"], temperature=1.0, micro=BUDGET, counts=engine.counts(rows))
    assert not any(parameter.requires_grad for parameter in engine._parameters.values())


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_computes_low_and_keeps_float32_master_weights(folder: str, world: int) -> None:
    dims = ParallelDims(dp_shard=world)
    plain = steps(Case(folder))
    ranks = run_ranks(world, steps, Case(folder, dims=dims, param_dtype="bf16"))
    assert all(block[2].dtype == torch.float32 for block in ranks[0]["after"].values())
    # bf16 has 8 bits of mantissa: about 1 % on a norm of many terms.
    assert ranks[0]["metrics"][0]["grad/norm"] == pytest.approx(plain["metrics"][0]["grad/norm"], rel=0.02)
    assert ranks[0]["metrics"][0]["loss"] == pytest.approx(plain["metrics"][0]["loss"], abs=0.02)


def test_metrics_do_not_depend_on_micro_batches(folder: str) -> None:
    few = steps(Case(folder, micro=MicroBatching(max_tokens=1000)))["metrics"][0]
    many = steps(Case(folder, micro=MicroBatching(max_rows=1)))["metrics"][0]
    assert few.keys() == many.keys()
    for name in few:
        assert many[name] == pytest.approx(few[name], abs=1e-5), name


def test_a_head_gives_only_what_it_has(folder: str) -> None:
    rows = make_rows(2)
    with pytest.raises(EngineError, match="values"):
        build(Case(folder)).forward(rows, frozenset({"values"}), temperature=1.0, micro=BUDGET)
    with pytest.raises(EngineError, match="log_probs"):
        build(Case(folder, head="value")).forward(rows, LM, temperature=1.0, micro=BUDGET)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        # Without a world, or in the one-rank world that an earlier job of this process left.
        ({"dims": ParallelDims(dp_shard=2)}, "torch.distributed|the process group has 1"),
        ({"param_dtype": "fp16"}, "loss scaling"),
    ],
)
def test_what_is_not_supported_is_refused_at_start(folder: str, change: dict, match: str) -> None:
    with pytest.raises((ConfigError, EngineError), match=match):
        build(Case(folder, **change))


def test_micro_batching_needs_one_rule(folder: str) -> None:
    rows = make_rows(2)
    for micro in (MicroBatching(), MicroBatching(max_tokens=1, max_rows=1)):
        with pytest.raises(ConfigError, match="give one of both"):
            build(Case(folder)).forward(rows, LM, temperature=1.0, micro=micro)


def test_offload_on_cpu_changes_nothing_and_unknown_parts_are_named(folder: str) -> None:
    engine = build(Case(folder))
    before = blocks(engine)
    engine.offload(["parameters", "optimizer"])
    engine.onload(["parameters", "optimizer"])
    assert all(torch.equal(before[name][2], after[2]) for name, after in blocks(engine).items())
    with pytest.raises(ConfigError, match="gradients"):
        engine.offload(["gradients"])


def attempt(case: Case) -> None:
    build(case)


def test_optimizers_that_cannot_step_on_shards_are_refused_before_the_first_step(folder: str) -> None:
    """Adafactor mixes rows and columns of a matrix; on one rank it has them."""
    case = Case(folder, optim={"optimizer": "torch.optim.Adafactor", "lr": 1e-2}, dims=ParallelDims(dp_shard=2))
    with pytest.raises(RankError, match="Adafactor cannot step on parameters that are cut over ranks: use AdamW"):
        run_ranks(2, attempt, case)
    attempt(replace(case, dims=ParallelDims()))


@pytest.mark.parametrize(
    ("optim", "match"),
    [
        ({"optimizer": "torch.optim.SparseAdam"}, "SparseAdam cannot step on dense gradients"),
        ({"optimizer": "torch.optim.LBFGS"}, "does not fit torch.optim.LBFGS"),
        ({"optimizer": "torch.optim.Rprop", "weight_decay": 0.1}, "torch.optim.Rprop decays no weights: use 0"),
        ({"optimizer": "AdamW", "override_optimizer_config": {"momentum": 0.9}}, "does not fit AdamW.*momentum"),
    ],
)
def test_arguments_that_an_optimizer_does_not_take_are_named(folder: str, optim: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        attempt(Case(folder, optim=optim))
