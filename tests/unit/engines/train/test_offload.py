"""Activations in host memory: parameters stay, gradients are the same, and on a CPU it is said that nothing happens.

The copies are real here too, from one place in host memory to another; pinned memory and streams need a GPU.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.offload import ActivationOffload
from hybridflow.topology.parallel import ParallelDims
from tests.invariants.training_steps import LOSSES, Case, assemble, blocks, build, own_rows, rows_of
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

MICRO = MicroBatching(max_tokens=10_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def step(case: Case, offloads: bool, rank: int = 0) -> dict[str, Any]:
    """One update; the weights after it, what was parked, and how many tokens of the hidden size there were."""
    engine = build(case)
    holder = ActivationOffload("cpu", smallest_bytes=1024)
    if offloads:
        engine._model.around_body = partial(_same, holder)
    rows = own_rows(rows_of(case), case.dims, rank)
    engine.update(rows, LOSSES["lm"], temperature=1.0, micro=case.micro, counts=engine.counts(rows))
    return {"after": blocks(engine), "parked": holder.parked, "bytes": holder.parked_bytes}


def _same(holder: ActivationOffload) -> ActivationOffload:
    return holder


def ranked(case: Case, offloads: bool) -> dict[str, Any]:
    return step(case, offloads, torch.distributed.get_rank())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_the_same_and_activations_were_parked(folder: str, checkpointed: bool) -> None:
    case = Case(folder, micro=MICRO, model={"enable_gradient_checkpointing": checkpointed})
    plain, parked = step(case, False), step(case, True)
    want, got = assemble([plain["after"]]), assemble([parked["after"]])
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert plain["parked"] == 0 and parked["parked"] > 0
    tokens = sum(int(length) for length in _tokens(case))
    if checkpointed:
        # What is left to save is the input of each of the two layers, and a few numbers of the last norm.
        assert 2 * tokens * 64 * 4 <= parked["bytes"] <= 6 * tokens * 64 * 4
    else:
        assert parked["bytes"] > 10 * tokens * 64 * 4


def _tokens(case: Case) -> list[int]:
    rows = rows_of(case)
    return [int(p + r - 1) for p, r in zip(rows["prompt_length"], rows["response_length"], strict=True) if r > 0]


@pytest.mark.parametrize("dims", [ParallelDims(dp_shard=2), ParallelDims(tp=2)], ids=["dp 2", "tp 2"])
def test_layouts_get_the_same_gradients_too(folder: str, dims: ParallelDims) -> None:
    case = Case(folder, micro=MICRO, dims=dims)
    plain, parked = (run_ranks(2, ranked, case, offloads) for offloads in (False, True))
    want, got = (assemble([rank["after"] for rank in ranks]) for ranks in (plain, parked))
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert all(rank["parked"] > 0 for rank in parked)


def saved_shapes(case: Case) -> dict[str, Any]:
    """Shapes that were parked, and the shapes of all weights as this rank computes with them."""
    engine = build(case)
    seen: list[tuple[int, ...]] = []

    class Spy(ActivationOffload):
        def _pack(self, saved: torch.Tensor) -> Any:
            kept = super()._pack(saved)
            if kept is not saved:
                seen.append(tuple(kept.host.shape))
            return kept

    engine._model.around_body = lambda: Spy("cpu", smallest_bytes=0)
    rows = rows_of(case)
    engine.update(rows, LOSSES["lm"], temperature=1.0, micro=case.micro, counts=engine.counts(rows))
    weights = {shape for name, shape in engine.parameter_shapes().items() if len(shape) == 2}
    return {"parked": set(seen), "weights": weights | {shape[::-1] for shape in weights}}


@pytest.mark.parametrize("world", [1, 2], ids=["one rank", "dp 2"])
def test_weights_are_never_parked(folder: str, world: int) -> None:
    """No token count of these rows is a width of the model, so that a weight's shape is a weight."""
    case = Case(folder, micro=MICRO, dims=ParallelDims(dp_shard=world))
    found = run_ranks(world, saved_shapes, case) if world > 1 else [saved_shapes(case)]
    for rank in found:
        assert rank["parked"] and not rank["parked"] & rank["weights"]


def test_small_tensors_and_other_devices_stay() -> None:
    one, many = torch.ones(3, requires_grad=True), torch.ones(100, requires_grad=True)
    holder, elsewhere = ActivationOffload("cpu", smallest_bytes=100), ActivationOffload("meta", smallest_bytes=0)
    with holder:
        (one.exp().exp().sum() + many.exp().exp().sum()).backward()
    assert holder.parked_bytes == 2 * 400, "two results of 100 numbers"
    with elsewhere:
        many.exp().exp().sum().backward()
    assert elsewhere.parked == 0


def test_on_a_cpu_nothing_moves_and_that_is_said(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build(Case(folder, model={"enable_activation_offload": True}))
    assert "does nothing on a CPU" in caplog.text
    assert not isinstance(engine._model.around_body(), saved_tensors_hooks)
