"""A step in which memory ended, anywhere, equals the undisturbed step; a rank that runs out makes all cut smaller.

The allocator's own error is raised at a chosen layer of a chosen micro-batch, in forward or backward, on one rank or on
all. Tolerance 1e-6: the retry cuts other micro-batches, whose sums round differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.algorithms.contract import Counts, Metric, Outputs
from hybridflow.batch.batch import Batch
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.engines.train.shortage import Budgets, Shortage
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import DeviceMemoryError
from tests.faults.out_of_memory import memory_ends
from tests.invariants.training_steps import LOSSES, Case, blocks, build, make_rows, own_rows
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

LAYERS = 2
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS))


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's blocks by name."""
    return {name: local for name, (_, _, local) in blocks(engine).items()}


def two_steps(case: Case, places: list[tuple[int, str]], hungry: tuple[int, ...], kind: str) -> list[dict[str, Any]]:
    """For every place (None first) the weights after two steps; memory ends there in the first, on ranks ``hungry``."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    results = []
    for place in [None, *places]:
        engine = build(case)
        rows = own_rows(make_rows(case.rows), case.dims, rank)
        counts = engine.counts(rows)

        def step(engine: Any = engine, rows: Any = rows, counts: Any = counts) -> dict[str, float]:
            return engine.update(rows, LOSSES[case.head], temperature=case.temperature, micro=case.micro, counts=counts)

        def forward(engine: Any = engine, rows: Any = rows) -> torch.Tensor:
            return engine.forward(rows, frozenset({"log_probs"}), temperature=1.0, micro=case.micro)["log_probs"]

        if place is not None and rank in hungry:
            with memory_ends(call=place[0], where=place[1], kind=kind):
                metrics = step()
            with memory_ends(call=place[0] // 2, where="forward", kind=kind):
                log_probs = forward()
        else:
            metrics, log_probs = step(), forward()
        second = step()
        results.append({"after": weights(engine), "metrics": [metrics, second], "log_probs": log_probs})
    return results


def assert_equal_steps(results: list[dict[str, Any]]) -> None:
    plain, *disturbed = results
    for found in disturbed:
        assert found["metrics"][0]["out_of_memory"] == 1.0 and found["metrics"][1]["out_of_memory"] == 0.0
        for name, block in plain["after"].items():
            torch.testing.assert_close(found["after"][name], block, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(found["log_probs"], plain["log_probs"], atol=1e-5, rtol=0)
        for one, two in zip(plain["metrics"], found["metrics"], strict=True):
            assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
            assert two["grad/norm"] == pytest.approx(one["grad/norm"], rel=1e-5)


PLACES = [(0, "forward"), (1, "forward"), (LAYERS, "forward"), (0, "backward"), (1, "backward"), (LAYERS, "backward")]
"""First and second layer of the first micro-batch, first layer of the second one, forward and backward."""


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_on_one_rank_the_step_is_done_again_with_smaller_micro_batches(folder: str, kind: str) -> None:
    assert_equal_steps(two_steps(Case(folder), PLACES, (0,), kind))


@pytest.mark.parametrize(
    ("dims", "sharding"),
    [
        (ParallelDims(dp_shard=2), {}),
        (ParallelDims(dp_shard=2), {"reshard_after_forward": False}),
        (ParallelDims(dp_replicate=2), {}),
    ],
    ids=["zero-3", "zero-2", "replicas"],
)
@pytest.mark.parametrize("hungry", [(1,), (0, 1)], ids=["one runs out", "both run out"])
def test_on_two_ranks_all_agree_and_nobody_hangs(
    folder: str, dims: ParallelDims, sharding: dict[str, Any], hungry: tuple[int, ...]
) -> None:
    case = Case(folder, dims=dims, sharding=sharding, rows=12)
    for results in run_ranks(2, two_steps, case, PLACES, hungry, "cuda", deadline_s=100.0):
        assert_equal_steps(results)


@pytest.mark.slow
def test_replicas_of_shards_agree_too(folder: str) -> None:
    case = Case(folder, dims=ParallelDims(dp_replicate=2, dp_shard=2), rows=32)
    for results in run_ranks(4, two_steps, case, PLACES, (2,), "cuda", deadline_s=200.0):
        assert_equal_steps(results)


def test_checkpointed_activations_may_run_out_in_the_recomputation(folder: str) -> None:
    case = Case(folder, dims=ParallelDims(dp_shard=2), model={"enable_gradient_checkpointing": True}, rows=12)
    for results in run_ranks(2, two_steps, case, [(2 * LAYERS - 1, "forward")], (1,), "cuda"):
        assert_equal_steps(results)


def never_enough(case: Case) -> list[str]:
    """The error of every rank when only rank ``world - 1`` has no memory for anything."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    engine = build(case)
    before = weights(engine)
    rows = own_rows(make_rows(case.rows), case.dims, rank)
    counts = engine.counts(rows)
    errors = []
    for pass_ in ("update", "forward"):
        with (
            memory_ends(call=-1 if rank == world - 1 else 10**6, where="forward", above_tokens=1),
            pytest.raises(DeviceMemoryError) as got,
        ):
            if pass_ == "update":
                engine.update(rows, LOSSES["lm"], temperature=1.0, micro=case.micro, counts=counts)
            else:
                engine.forward(rows, frozenset({"log_probs"}), temperature=1.0, micro=case.micro)
        errors.append(str(got.value))
    assert all(torch.equal(block, before[name]) for name, block in weights(engine).items())
    return errors


@pytest.mark.parametrize("world", [1, 2])
def test_a_row_that_never_fits_is_an_error_with_tokens_and_consumers_on_every_rank(folder: str, world: int) -> None:
    case = Case(folder, dims=ParallelDims(dp_shard=world), optim={"optimizer": "AdamW"})
    found = [never_enough(case)] if world == 1 else run_ranks(2, never_enough, case)
    for update, forward in found:
        assert f"rank {world - 1} ran out of memory in the update pass over a single row" in update
        assert "Tried to allocate 2.00 GiB" in update and "tokens in a micro-batch" in update
        assert "parameters " in update and "rest of this process" in update
        assert "the forward pass over a single row" in forward
    assert len({tuple(errors) for errors in found}) == 1


MODEL_PARALLEL = {
    "sp 2": ParallelDims(sp=2),
    "tp 2": ParallelDims(tp=2),
    "pp 2": ParallelDims(pp=2),
}


@pytest.mark.parametrize(
    "hungry", [(1,), pytest.param((0, 1), marks=pytest.mark.slow)], ids=["one runs out", "both run out"]
)
@pytest.mark.parametrize("layout", MODEL_PARALLEL)
def test_ranks_that_exchange_activations_are_met_with_the_sizes_they_expect(
    folder: str, layout: str, hungry: tuple[int, ...]
) -> None:
    places = [(0, "forward"), (LAYERS, "forward"), (1, "backward")] if len(hungry) == 1 else PLACES
    case = Case(folder, dims=MODEL_PARALLEL[layout], rows=12)
    for results in run_ranks(2, two_steps, case, places, hungry, "cuda", deadline_s=100.0):
        assert_equal_steps(results)


@dataclass(frozen=True)
class KLLoss:
    """The exact KL, token mean."""

    needs: frozenset[str] = frozenset({"full_kl"})

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[torch.Tensor, dict[str, Metric]]:
        assert outputs.full_kl is not None
        return torch.where(rows["loss_mask"], outputs.full_kl, 0.0).sum() / counts.tokens, {}


def steps_beside_a_reference(case: Case, places: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """``two_steps`` of an exact KL to the model's own start, after a step that moves it; memory ends on rank 1."""
    rank = dist.get_rank()
    results = []
    for place in [None, *places]:
        engine = build(case)
        model, sharding = ModelConfig(path=case.folder), FSDPConfig()
        engine.compare_with(FSDPEngine(model=model, head="lm", sharding=sharding, dims=case.dims, optim=None))
        rows = own_rows(make_rows(case.rows), case.dims, rank)
        settings = {"temperature": 0.7, "micro": case.micro, "counts": engine.counts(rows)}
        if place is not None and rank == 1:
            with memory_ends(call=place[0], where=place[1]):
                first = engine.update(rows, KLAndPush(), **settings)
        else:
            first = engine.update(rows, KLAndPush(), **settings)
        second = engine.update(rows, KLLoss(), **settings)
        results.append({"after": weights(engine), "metrics": [first, second], "log_probs": torch.zeros(1)})
    return results


@dataclass(frozen=True)
class KLAndPush(KLLoss):
    """The KL of two equal models has no gradient: log-probs give one."""

    needs: frozenset[str] = frozenset({"full_kl", "log_probs"})

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[torch.Tensor, dict[str, Metric]]:
        assert outputs.log_probs is not None
        loss, metrics = super().__call__(outputs, rows, counts)
        return loss + torch.where(rows["loss_mask"], outputs.log_probs, 0.0).sum() / counts.tokens, metrics


@pytest.mark.parametrize(
    ("dims", "places"),
    [
        # A rank's three micro-batches, each first the reference's layers, then the policy's; the first place is in the
        # very first forward of any model.
        (ParallelDims(dp_shard=2), [(0, "forward"), (LAYERS, "forward"), (LAYERS + 1, "backward")]),
        # Six micro-batches over a stage of half the layers, all of the reference's before the policy's.
        (ParallelDims(pp=2), [(0, "forward"), (3 * LAYERS // 2, "forward"), (3 * LAYERS, "forward"),
                              (7 * LAYERS // 2, "backward")]),
    ],
    ids=["dp 2", "pp 2"],
)  # fmt: skip
def test_memory_may_end_in_the_reference_s_pass_and_beside_it(
    folder: str, dims: ParallelDims, places: list[tuple[int, str]]
) -> None:
    case = Case(folder, dims=dims, rows=12, micro=MicroBatching(max_rows=2))
    for results in run_ranks(2, steps_beside_a_reference, case, places, deadline_s=100.0):
        assert_equal_steps(results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(dp_shard=2, tp=2),
        ParallelDims(sp=2, tp=2),
        ParallelDims(dp_shard=2, sp=2),
        ParallelDims(dp_shard=2, pp=2),
        ParallelDims(pp=2, tp=2),
    ],
    ids=lambda dims: " ".join(f"{name} {size}" for name, size in dims.degrees.items() if size > 1),
)
def test_that_holds_for_products_of_layouts(folder: str, dims: ParallelDims) -> None:
    """Also in the second engine of a process, which may exchange in the groups of the first one's mesh."""
    case, places = Case(folder, dims=dims, rows=24), [(0, "forward"), (1, "backward")]
    for results in run_ranks(4, two_steps, case, places, (2,), "cuda", deadline_s=250.0):
        assert_equal_steps(results)


@pytest.mark.parametrize("layout", MODEL_PARALLEL)
def test_a_row_that_never_fits_is_an_error_on_every_rank_of_any_layout(folder: str, layout: str) -> None:
    found = run_ranks(2, never_enough, Case(folder, dims=MODEL_PARALLEL[layout]))
    for update, forward in found:
        assert "rank 1 ran out of memory in the update pass over a single row" in update
        assert "the forward pass over a single row" in forward


def test_a_budget_is_halved_from_what_was_too_much_and_stays_small() -> None:
    budgets = Budgets()
    wide = MicroBatching(max_tokens=16384)
    assert budgets.of("update", wide) == wide
    budgets.halve("update", wide, Shortage(rank=0, tokens=5000, alone=False))
    assert budgets.of("update", wide) == MicroBatching(max_tokens=2500)
    assert budgets.of("update", MicroBatching(max_tokens=100)) == MicroBatching(max_tokens=100)
    assert budgets.of("forward", wide) == wide
    rows = MicroBatching(max_rows=4)
    budgets.halve("forward", rows, Shortage(rank=0, tokens=5000, alone=False))
    assert budgets.of("forward", rows) == MicroBatching(max_rows=2)
