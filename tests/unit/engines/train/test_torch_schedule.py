"""torch's pipeline schedules: as many updates as one likes, each with its own number of micro-batches and lengths."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.engines.train.base import MicroBatching
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import DeviceMemoryError
from tests.faults.out_of_memory import memory_ends
from tests.invariants.training_steps import LOSSES, Case, blocks, build, make_rows
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

UPDATES = [
    (make_rows(8, seed=1), MicroBatching(max_tokens=40)),
    (make_rows(5, seed=2, width=20), MicroBatching(max_rows=1)),
    (make_rows(2, seed=3), MicroBatching(max_tokens=10_000)),
]
"""Rows and how they are cut: several micro-batches, more and longer ones, fewer than stages."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=3))


def three_updates(case: Case) -> list[dict[str, Any]]:
    """Every schedule's weights, log-probs before the last update, metrics, and tokens computed beside those of rows."""
    results = []
    for schedule in ("1f1b", "torch_1f1b", "torch_gpipe"):
        engine = build(replace(case, engine={"pipeline_schedule": schedule}))
        metrics, works = [], []
        for rows, micro in UPDATES:
            read = engine.forward(rows, frozenset({"log_probs"}), temperature=1.0, micro=micro)["log_probs"]
            engine.work()
            counts = engine.counts(rows)
            metrics.append(engine.update(rows, LOSSES["lm"], temperature=0.7, micro=micro, counts=counts))
            works.append(engine.work())
        weights = {name: local for name, (_, _, local) in blocks(engine).items()}
        results.append({"weights": weights, "read": read, "metrics": metrics, "works": works})
    return results


def test_updates_of_other_lengths_and_numbers_on_three_stages_equal_those_of_our_schedule(folder: str) -> None:
    """The stage in the middle receives and sends both ways. SGD with rate 1: weights are sums of gradients."""
    for ours, *others in run_ranks(3, three_updates, Case(folder, dims=ParallelDims(pp=3))):
        for found in others:
            for name, local in ours["weights"].items():
                torch.testing.assert_close(found["weights"][name], local, atol=3e-6, rtol=0)
            torch.testing.assert_close(found["read"], ours["read"], atol=1e-5, rtol=0)
            for one, other in zip(ours["metrics"], found["metrics"], strict=True):
                assert other == pytest.approx(one, abs=1e-4)
            for number, (one, other) in enumerate(zip(ours["works"], found["works"], strict=True)):
                assert other.tokens == one.tokens and other.flops == one.flops
                assert other.slots > one.slots or number == 2, "what is padded counts as computed"


def one_update_without_memory(case: Case, place: str, told: Path) -> str:
    """The kind of error that a rank sees when the last one runs out of memory, writes so to ``told`` and is gone."""
    engine = build(case)
    rows = make_rows(8)
    counts = engine.counts(rows)
    last = engine._model.last
    with memory_ends(call=1 if last else 10**6, where=place):
        try:
            engine.update(rows, LOSSES["lm"], temperature=1.0, micro=case.micro, counts=counts)
        except DeviceMemoryError as error:
            told.write_text(str(error))
            os._exit(1)
        except RuntimeError as error:
            return type(error).__name__
    return "no error"


@pytest.mark.parametrize(
    ("schedule", "place"), [("torch_1f1b", "forward"), ("torch_gpipe", "backward")], ids=["1F1B", "GPipe"]
)
def test_out_of_memory_is_one_error_that_names_the_schedule_which_could_go_on(
    folder: str, schedule: str, place: str, tmp_path: Path
) -> None:
    case = Case(folder, dims=ParallelDims(pp=2), engine={"pipeline_schedule": schedule})
    told = tmp_path / "told"
    neighbour, _ = run_ranks(2, one_update_without_memory, case, place, told, deadline_s=30.0, may_die=(1,))
    own = told.read_text()
    assert "rank 1 ran out of memory in the update pass" in own and "CUDA out of memory. Tried to" in own
    assert f"pipeline_schedule={schedule} cannot be played again" in own and "use pipeline_schedule=1f1b" in own
    assert neighbour == "RuntimeError"
