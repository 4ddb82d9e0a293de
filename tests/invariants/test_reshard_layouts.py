"""Law: whatever the two layouts, resharding reproduces the original bit for bit, and moves no byte that it need not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from hybridflow.hybrid_engine.boxes import volume, within
from hybridflow.hybrid_engine.layouts import ModelShapes, TrainingLayout, predict
from hybridflow.hybrid_engine.plan import RankPlan, Slice, bound_bytes, ideal_bytes, plan_rank
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError
from tests.ranks import run_ranks
from tests.unit.hybrid_engine.cases import (
    MODELS,
    full_weights,
    parts_of,
    shards_of,
    tiny_shapes,
    training_layouts,
    wrong_parts,
)


def pairs(world: int, model: ModelShapes):
    """(training, generation, slices) of every pair of layouts that the model allows."""
    for tp in (n for n in (1, 2, 4, 8) if n <= world):
        generation = ParallelDims(dp_shard=world // tp, tp=tp)
        for training in training_layouts(world, tp):
            if divides(model, tp):
                yield training, generation, predict(model, training, generation, dtype="bfloat16")
            else:
                with pytest.raises(ConfigError, match="does not divide"):
                    predict(model, training, generation)


def divides(model: ModelShapes, tp: int) -> bool:
    """Whether a generator of this degree can cut the MLP; heads and vocabularies of these models always divide."""
    return all(shape[-1] % tp == 0 for name, shape in model.shapes.items() if "down_proj" in name)


def execute(slices: Sequence[Slice], plans: Sequence[RankPlan], full, dtype) -> list[str]:
    """Carries out all ranks' plans on tensors, each receive from the sender's own send; what came out wrong."""
    world = len(plans)
    shards = [{shard.name: shard for shard in shards_of(slices, full, rank)} for rank in range(world)]
    sends = {
        (rank, move.peer, index, move.box)
        for rank, plan in enumerate(plans)
        for group in plan.groups
        for move in group.sends
        for index in group.slices
    }
    wrong = []
    for rank, plan in enumerate(plans):
        parts = parts_of(slices, {name: t.shape for name, t in full.items()}, rank, dtype)
        slots: dict[str, int] = {}
        storage = {}
        for part in parts.parts:
            storage[part.hf_name, slots.setdefault(part.hf_name, 0)] = part
            slots[part.hf_name] += 1
        for group in plan.groups:
            for index in group.slices:
                piece = slices[index]
                moves = [(move.peer, move.box) for move in group.receives]
                for peer, _box in moves:
                    sends.remove((peer, rank, index, _box))
                for peer, box in moves + ([(rank, group.local)] if group.local is not None else []):
                    part, shard = storage[piece.name, piece.slot], shards[peer][piece.name]
                    part.view[within(box, part.hf_box)] = shard.local[within(box, shard.box)].to(dtype)
        wrong += [f"rank {rank}: {name}" for name in wrong_parts(parts, full)]
    return wrong + [f"sent to nobody: {send}" for send in sends]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_resharding_equals_the_original_for_every_pair_of_layouts(kind, world):
    model = MODELS[kind]
    full = full_weights(model.shapes)
    tried = 0
    for training, generation, slices in pairs(world, model):
        plans = [plan_rank(slices, rank) for rank in range(world)]
        assert execute(slices, plans, full, torch.bfloat16) == [], (training, generation)
        for rank, plan in enumerate(plans):
            assert plan.received_bytes == plan.bound_bytes == bound_bytes(slices, rank), (training, generation, rank)
        assert sum(plan.received_bytes for plan in plans) == sum(plan.sent_bytes for plan in plans)
        tried += 1
    assert tried >= world  # at least one pair for each generation tp, times training layouts


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)])
def test_permuted_order_receives_the_least_that_any_layout_could(world, tp):
    model = tiny_shapes(inner=64, vocabulary=512, head_size=8)  # everything but norms divides by all degrees
    generation = ParallelDims(dp_shard=world // tp, tp=tp)
    permuted = predict(model, TrainingLayout.permuted(ParallelDims(dp_shard=world), tp), generation)
    plain = predict(model, TrainingLayout(dims=ParallelDims(dp_shard=world)), generation)
    norms = sum(shape[0] for shape in model.shapes.values() if len(shape) == 1) * 2
    for rank in range(world):
        assert plan_rank(permuted, rank).received_bytes == ideal_bytes(permuted, rank)
        whole = sum(volume(tuple((0, n) for n in shape)) for shape in model.shapes.values()) * 2
        formula = (whole - norms) // tp - (whole - norms) // world  # M (1/t - 1/N)
        assert plan_rank(permuted, rank).received_bytes == formula + norms - norms // world
    if tp > 1:
        worst = [max(plan_rank(slices, rank).received_bytes for rank in range(world)) for slices in (permuted, plain)]
        assert worst[0] < worst[1]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_whole_experts_on_a_rank_are_resharded_bit_for_bit(tp):
    """Expert parallelism: 4 experts over up to 8 ranks of a replica, some of which hold none."""
    model, world = MODELS["experts"], 8
    full, generation = full_weights(model.shapes), ParallelDims(dp_shard=world // tp, tp=tp)
    for training in training_layouts(world, tp):
        slices = predict(model, training, generation, expert_parallel=True)
        plans = [plan_rank(slices, rank) for rank in range(world)]
        assert execute(slices, plans, full, torch.bfloat16) == [], training
        assert [plan.received_bytes for plan in plans] == [bound_bytes(slices, rank) for rank in range(world)]


def test_trainer_tp_equal_to_rollout_tp_needs_no_permutation():
    model = tiny_shapes(inner=64, vocabulary=512, head_size=8)
    slices = predict(model, TrainingLayout(dims=ParallelDims(dp_shard=4, tp=2)), ParallelDims(dp_shard=4, tp=2))
    for rank in range(8):
        assert plan_rank(slices, rank).received_bytes == ideal_bytes(slices, rank)


REAL = {
    # name: (model, training dims, permuted, generation tp, dtype of the generator, bucket bytes)
    "one rank": ("untied", {"dp_shard": 1}, False, 1, "float32", 1 << 20),
    "2 ranks, tp 1": ("untied", {"dp_shard": 2}, False, 1, "float32", 1 << 20),
    "2 ranks, tp 2, tiny buckets": ("grouped-query, biased", {"dp_shard": 2}, True, 2, "bfloat16", 64),
    "4 ranks, plain": ("tied, padded vocabulary", {"dp_shard": 4}, False, 2, "bfloat16", 4096),
    "4 ranks, permuted": ("tied, padded vocabulary", {"dp_shard": 4}, True, 2, "float32", 4096),
    "4 ranks, tp 4 over 2 kv heads": ("grouped-query, biased", {"dp_shard": 4}, True, 4, "bfloat16", 512),
    "4 ranks, HSDP": ("uneven", {"dp_replicate": 2, "dp_shard": 2}, False, 2, "float32", 2048),
    "4 ranks, HSDP permuted": ("query-key norms", {"dp_replicate": 2, "dp_shard": 2}, True, 2, "bfloat16", 64),
    "4 ranks, FSDP x TP": ("uneven", {"dp_shard": 2, "tp": 2}, False, 4, "float16", 4096),
    "4 ranks, experts": ("experts", {"dp_shard": 4}, False, 2, "bfloat16", 4096),
    "4 ranks, pipeline": ("untied", {"pp": 2, "dp_shard": 2}, False, 2, "float32", 4096),
    "8 ranks, FSDP x TP": ("query-key norms", {"dp_shard": 4, "tp": 2}, False, 2, "bfloat16", 4096),
    "8 ranks, permuted, empty shards": ("query-key norms", {"dp_shard": 8}, True, 4, "bfloat16", 4096),
}


def slices_of(case: str) -> tuple[ModelShapes, list[Slice], torch.dtype, int]:
    kind, degrees, permuted, tp, dtype, bucket_bytes = REAL[case]
    dims = ParallelDims(**degrees)
    training = TrainingLayout.permuted(dims, tp) if permuted else TrainingLayout(dims=dims)
    rollout = getattr(torch, dtype)
    generation = ParallelDims(dp_shard=dims.world // tp, tp=tp)
    slices = predict(MODELS[kind], training, generation, dtype=dtype, itemsize=rollout.itemsize)
    return MODELS[kind], slices, rollout, bucket_bytes


def publish_twice(case: str) -> dict:
    """On a rank: publish, train (other values), publish again; what was wrong, and the metrics."""
    import torch.distributed as dist

    model, slices, dtype, bucket_bytes = slices_of(case)
    rank, told, wrong = dist.get_rank(), [], []
    now = {}
    parts = parts_of(slices, model.shapes, rank, dtype)
    publisher = Publisher(
        lambda: shards_of(slices, now, rank), lambda: parts, told.append, bucket_bytes=bucket_bytes, verify="always"
    )
    for version in (0, 1):
        now.update(full_weights(model.shapes, seed=version))
        metrics = publisher.publish(version)
        wrong += wrong_parts(parts, now)
    return {"wrong": wrong, "told": told, "metrics": metrics, "bound": bound_bytes(slices, rank)}


@pytest.mark.parametrize("case", REAL)
def test_real_processes_move_exactly_the_bound_and_get_the_original(case):
    *_, bucket_bytes = REAL[case]
    _model, slices, *_ = slices_of(case)
    answers = run_ranks(len(slices[0].owned), publish_twice, case)
    for rank, answer in enumerate(answers):
        assert answer["wrong"] == []
        assert answer["told"] == [-1, 0, -1, 1]
        assert answer["metrics"]["publish/bytes"] == answer["bound"] == plan_rank(slices, rank).received_bytes
        assert answer["metrics"]["publish/peak_extra_bytes"] <= 2 * bucket_bytes
    if len(answers) > 1 and bucket_bytes < 1 << 20:
        assert answers[0]["metrics"]["publish/rounds"] > 2  # several buckets, so that two were in flight


def test_every_generation_tp_was_tried():
    seen = {(generation.tp, training.dims) for training, generation, _ in pairs(8, MODELS["untied"])}
    assert {tp for tp, _ in seen} == {1, 2, 4, 8}
    assert {(d.dp_replicate, d.dp_shard, d.tp) for _, d in seen} == {
        (r, s, t) for r, s, t in product((1, 2, 4, 8), repeat=3) if r * s * t == 8
    }
