"""What an update costs: FLOPs by hand and by torch's own counter, tokens, roundings, waiting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.work import Architecture, Work, peak_flops
from hybridflow.models.packing import row_tokens
from hybridflow.topology.parallel import ParallelDims
from tests.invariants.training_steps import LOSSES, Case, build, make_rows, own_rows
from tests.ranks import run_ranks
from tests.tiny import EXPERTS, save_tiny_model

NUMBERS = Architecture(
    layer_weights=100,
    trained_layer_weights=100,
    head_weights=30,
    trained_head_weights=30,
    attention_width=5,
    hidden=10,
)


def test_flops_computed_by_hand() -> None:
    # 5 tokens, 4 of which are read; segments of 3 and 2 have 6 + 3 causal pairs, each 4 FLOPs of width forward.
    assert NUMBERS.update_flops((3, 2), 4) == 6 * 5 * 100 + 6 * 4 * 30 + 3 * 4 * (6 + 3) * 5


def test_frozen_weights_have_no_weight_gradient() -> None:
    frozen = replace(NUMBERS, trained_layer_weights=0, trained_head_weights=0)
    assert NUMBERS.update_flops((3, 2), 4) - frozen.update_flops((3, 2), 4) == 2 * 5 * 100 + 2 * 4 * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def test_flops_of_matrices_are_those_that_torch_counts(folder: str) -> None:
    micro = MicroBatching(max_tokens=10_000)
    engine = build(Case(folder))
    rows = make_rows(8)
    with FlopCounterMode(display=False) as counter:
        engine.update(rows, LOSSES["lm"], temperature=1.0, micro=micro, counts=engine.counts(rows))
    # Attention is left out: what torch counts of it depends on the kernel.
    products = {"aten.mm", "aten.addmm"}
    counted = sum(flops for name, flops in counter.get_flop_counts()["Global"].items() if str(name) in products)
    lengths = [int(length) for length in row_tokens(rows) if length > 0]
    pairs = 4 * sum(length * (length + 1) // 2 for length in lengths) * (2 * 64)  # two layers of width 64
    assert engine.work().flops - 3 * pairs == pytest.approx(counted, rel=1e-6)


def work(case: Case) -> Work:
    engine = build(case)
    rows = own_rows(make_rows(case.rows), case.dims, dist.get_rank() if dist.is_initialized() else 0)
    engine.update(rows, LOSSES[case.head], temperature=1.0, micro=case.micro, counts=engine.counts(rows))
    return engine.work()


def test_a_token_pays_for_the_experts_that_it_is_routed_to(tmp_path: Path) -> None:
    of_experts = save_tiny_model(tmp_path / "experts", family="qwen3_moe")
    width = EXPERTS["num_experts_per_tok"] * EXPERTS["moe_intermediate_size"]
    dense = save_tiny_model(tmp_path / "dense", family="qwen3", intermediate_size=width)
    one, other = (work(Case(str(folder))) for folder in (of_experts, dense))
    router = 2 * EXPERTS["num_experts"] * 64  # in two layers of width 64
    assert one.flops == pytest.approx(other.flops + 6 * one.tokens * router)


@pytest.mark.parametrize(
    "dims", [ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(sp=2), ParallelDims(pp=2)], ids=str
)
def test_all_ranks_together_did_the_work_of_one(folder: str, dims: ParallelDims) -> None:
    one = work(Case(folder))
    ranks = run_ranks(2, work, Case(folder, dims=dims))
    assert ranks[0] == ranks[1]
    assert ranks[0].flops == pytest.approx(one.flops) and ranks[0].tokens == one.tokens
    assert one.slots == one.tokens and ranks[0].slots >= one.tokens and ranks[0].imbalance >= 1.0


def test_a_rank_without_rows_is_padding_and_imbalance(folder: str) -> None:
    # Four rows dealt out to 4 ranks; the fourth is empty: its rank stands in, and the others are not equally long.
    found = run_ranks(4, work, Case(folder, dims=ParallelDims(dp_shard=4), rows=4))[0]
    assert found.slots == found.tokens + 1
    assert found.imbalance > 4 / 3


def test_work_is_counted_since_the_last_question(folder: str) -> None:
    engine = build(Case(folder))
    rows = make_rows(4)
    update = dict(temperature=1.0, micro=MicroBatching(max_rows=2), counts=engine.counts(rows))
    engine.update(rows, LOSSES["lm"], **update)
    first = engine.work()
    assert engine.work() == Work(flops=0.0, tokens=0, slots=0, imbalance=1.0)
    engine.update(rows, LOSSES["lm"], **update)
    engine.update(rows, LOSSES["lm"], **update)
    assert engine.work().flops == pytest.approx(2 * first.flops)
    assert first.imbalance == 1.0, "one rank waits for nobody"


def test_the_peak_of_an_unknown_device_is_measured() -> None:
    assert 1e8 < peak_flops("cpu", torch.float32) < 1e14


def test_a_forward_is_a_third_of_an_update(folder: str) -> None:
    engine = build(Case(folder))
    rows, micro = make_rows(8), MicroBatching(max_tokens=10_000)
    engine.forward(rows, frozenset({"log_probs"}), temperature=1.0, micro=micro)
    forward = engine.work()
    engine.update(rows, LOSSES["lm"], temperature=1.0, micro=micro, counts=engine.counts(rows))
    update = engine.work()
    assert update.flops == pytest.approx(3 * forward.flops) and update.tokens == forward.tokens
