"""What a pipeline stage holds on to."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridflow.models.packing import pack
from hybridflow.topology.parallel import ParallelDims
from tests.invariants.training_steps import Case, build, make_rows
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model


def most_sends_under_way(case: Case) -> int:
    """The most hidden states that this stage kept for its neighbour at a time, over a forward of many micro-batches."""
    pipeline = build(case)._built.pipeline
    assert pipeline is not None
    rows, most = make_rows(12), 0
    packs = [pack(rows.rows([row])) for row in range(len(rows)) if row != 3]
    with torch.no_grad():
        for _ in pipeline.infer(packs, frozenset({"log_probs"}), 1.0):
            most = max(most, sum(map(len, pipeline._sends.values())))
    assert not any(pipeline._sends.values())
    return most


def test_no_more_states_wait_for_a_neighbour_than_there_are_stages(tmp_path: Path) -> None:
    case = Case(str(save_tiny_model(tmp_path)), dims=ParallelDims(pp=2))
    assert run_ranks(2, most_sends_under_way, case) == [2, 0]
