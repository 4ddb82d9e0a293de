"""The pure plan: order of shards, balance of senders, machines, JSON, hash, errors."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from hybridflow.hybrid_engine.layouts import TrainingLayout, predict
from hybridflow.hybrid_engine.plan import RankPlan, Slice, permuted_order, plan_rank, tables_digest
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError, EngineError
from tests.unit.hybrid_engine.cases import MODELS, tiny_shapes


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (8, 1), (8, 2), (8, 4), (8, 8), (12, 3)])
def test_permuted_order_is_the_formula_of_the_paper(world, tp):
    order = permuted_order(world, tp)
    for rank in range(world):
        assert order[(rank % tp) * (world // tp) + rank // tp] == rank


def test_permuted_order_needs_a_divisor():
    with pytest.raises(ConfigError, match="tp=3 does not divide 8"):
        permuted_order(8, 3)


def replicated(world: int, owners: list[int]) -> Slice:
    """A vector that ``owners`` have whole and everyone needs."""
    box = ((0, 16),)
    owned = tuple(box if rank in owners else None for rank in range(world))
    return Slice("model.norm.weight", 0, "float32", 4, owned, (box,) * world)


def test_several_owners_share_the_work():
    plans = [plan_rank([replicated(12, [0, 1, 2])], rank) for rank in range(12)]
    assert [plan.sent_bytes for plan in plans[:3]] == [3 * 64] * 3  # nine receivers over three owners
    assert all(plan.received_bytes == 64 for plan in plans[3:])


def test_owners_inside_the_machine_serve_first_and_in_turn():
    plans = [plan_rank([replicated(12, [0, 5, 6])], rank, ranks_per_node=4) for rank in range(12)]
    source = {plan.rank: plan.groups[0].receives[0].peer for plan in plans if plan.groups[0].receives}
    assert [source[rank] for rank in (1, 2, 3)] == [0, 0, 0]
    assert Counter(source[rank] for rank in (4, 7)) == {5: 1, 6: 1}
    assert Counter(source[rank] for rank in (8, 9, 10, 11)) == {0: 2, 5: 1, 6: 1}


@pytest.mark.parametrize("kind", MODELS)
def test_hsdp_replicas_send_about_the_same(kind):
    layout = TrainingLayout(dims=ParallelDims(dp_replicate=4, dp_shard=2))
    slices = predict(MODELS[kind], layout, ParallelDims(dp_shard=4, tp=2))
    sent = [plan_rank(slices, rank).sent_bytes for rank in range(8)]
    assert max(sent) <= 2 * sum(sent) / 8


def test_every_send_has_its_receive():
    slices = predict(
        MODELS["uneven"], TrainingLayout(dims=ParallelDims(dp_shard=4, tp=2)), ParallelDims(dp_shard=2, tp=4)
    )
    plans = [plan_rank(slices, rank) for rank in range(8)]
    sends = Counter((p.rank, m.peer, g.slices, m.box) for p in plans for g in p.groups for m in g.sends)
    receives = Counter((m.peer, p.rank, g.slices, m.box) for p in plans for g in p.groups for m in g.receives)
    assert sends == receives
    assert max(sends.values()) == 1


def test_a_plan_survives_json_and_prints_itself():
    slices = predict(MODELS["grouped-query, biased"], TrainingLayout(dims=ParallelDims(dp_shard=4)), ParallelDims(tp=4))
    plan = plan_rank(slices, 3)
    again = RankPlan.from_json(plan.to_json())
    assert again == plan
    assert again.digest() == plan.digest()
    text = plan.describe(slices)
    assert "rank 3 of 4" in text
    assert "model.layers.0.self_attn.q_proj.weight and 1 alike" in text


def test_hashes_are_the_same_in_another_process_and_differ_between_layouts():
    program = (
        "from hybridflow.hybrid_engine.layouts import TrainingLayout, predict\n"
        "from hybridflow.hybrid_engine.plan import plan_rank, tables_digest\n"
        "from hybridflow.topology.parallel import ParallelDims\n"
        "from tests.unit.hybrid_engine.cases import tiny_shapes\n"
        "s = predict(tiny_shapes(), TrainingLayout(dims=ParallelDims(dp_shard=4)), ParallelDims(dp_shard=2, tp=2))\n"
        "print(tables_digest(s), plan_rank(s, 1).digest())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    slices = predict(tiny_shapes(), TrainingLayout(dims=ParallelDims(dp_shard=4)), ParallelDims(dp_shard=2, tp=2))
    other = predict(tiny_shapes(), TrainingLayout.permuted(ParallelDims(dp_shard=4), 2), ParallelDims(dp_shard=2, tp=2))
    assert there == [tables_digest(slices), plan_rank(slices, 1).digest()]
    assert tables_digest(other) != tables_digest(slices)


def test_needs_that_nobody_owns_are_an_error_with_the_boxes():
    piece = Slice("a.weight", 0, "float32", 4, (((0, 2), (0, 4)), None), (((0, 4), (0, 4)), None))
    with pytest.raises(EngineError, match=r"a.weight: rank 0 needs \(\(0, 4\), \(0, 4\)\).*cover 8 of 16 elements"):
        plan_rank([piece], 0)


def test_the_plan_needs_no_torch():
    program = (
        "import sys, hybridflow.hybrid_engine.plan, hybridflow.hybrid_engine.layouts, hybridflow.hybrid_engine.rules\n"
        "print('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
