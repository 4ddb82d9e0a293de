"""The publisher over real processes: failures are learnt by all, devices may be separate, swapped slices are named."""

from __future__ import annotations

import torch

from hybridflow.engines.rollout.base import EngineParameters
from hybridflow.hybrid_engine.layouts import TrainingLayout, predict
from hybridflow.hybrid_engine.plan import Slice, intern
from hybridflow.hybrid_engine.publish import NO_VERSION, Publisher
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import EngineError
from tests.ranks import run_ranks
from tests.unit.hybrid_engine.cases import full_weights, parts_of, shards_of, tiny_shapes, wrong_parts

MODEL = tiny_shapes(layers=1, hidden=16, inner=16, heads=4, kv_heads=4)


def two_ranks_slices() -> list[Slice]:
    return predict(
        MODEL, TrainingLayout(dims=ParallelDims(dp_shard=2)), ParallelDims(tp=2), dtype="float32", itemsize=4
    )


def fail_midway() -> tuple:
    """Rank 1's o_proj has no data at the second publish; the third is whole again."""
    rank = torch.distributed.get_rank()
    slices, told, messages = two_ranks_slices(), [], []
    now, broken = full_weights(MODEL.shapes), []

    def shards():
        found = shards_of(slices, now, rank)
        if not broken or rank != 1:
            return found
        at = next(at for at, shard in enumerate(found) if "o_proj" in shard.name)
        found[at] = type(found[at])(found[at].name, found[at].local.to("meta"), found[at].box, found[at].shape)
        return found

    parts = parts_of(slices, MODEL.shapes, rank, torch.float32)
    publisher = Publisher(shards, lambda: parts, told.append, bucket_bytes=256)
    publisher.publish(0)
    now = full_weights(MODEL.shapes, seed=1)
    broken.append(True)
    try:
        publisher.publish(1)
    except EngineError as error:
        messages.append(str(error))
    version_after = publisher.version
    broken.clear()
    publisher.publish(2)
    return told, messages, version_after, wrong_parts(parts, now)


def test_a_failure_on_one_rank_is_raised_on_all_and_the_next_publish_succeeds():
    for told, messages, version_after, wrong in run_ranks(2, fail_midway):
        assert told == [NO_VERSION, 0, *3 * [NO_VERSION], NO_VERSION, 2]
        assert len(messages) == 1
        assert "while moving weights" in messages[0]
        assert "rank 1: NotImplementedError" in messages[0]
        assert "rank 0" not in messages[0]
        assert version_after == NO_VERSION
        assert wrong == []


def disagree(kind: str) -> str:
    rank = torch.distributed.get_rank()
    slices, full = two_ranks_slices(), full_weights(MODEL.shapes)
    parts = parts_of(slices, MODEL.shapes, rank, torch.float32)
    if kind == "missing" and rank == 1:
        parts = EngineParameters(parts.parts[1:])
    publisher = Publisher(lambda: shards_of(slices, full, rank), lambda: parts, lambda version: None)
    try:
        publisher.publish(rank if kind == "version" else 0)
    except EngineError as error:
        return str(error)
    return ""


def test_ranks_that_mean_different_versions_are_told_so():
    for message in run_ranks(2, disagree, "version"):
        assert "different versions by rank: {0: 0, 1: 1}; nothing was written" in message


def test_a_slice_that_no_rank_of_the_generator_holds_is_named_on_all_ranks():
    for message in run_ranks(2, disagree, "missing"):
        assert "incomplete: the generator's ranks hold 512 of 1024 elements of model.embed_tokens.weight" in message


def swap() -> str:
    """Rank 1 says that its down_proj slice is rank 0's, and stores it as its own."""
    rank = torch.distributed.get_rank()
    slices, full = two_ranks_slices(), full_weights(MODEL.shapes)
    parts = parts_of(slices, MODEL.shapes, rank, torch.float32)
    publisher = Publisher(lambda: shards_of(slices, full, rank), lambda: parts, lambda version: None, verify="always")
    publisher.publish(0)
    ready = publisher._ready
    sources = {shard.name: shard.local for shard in shards_of(slices, full, rank)}
    views = [part.view for part in parts.parts if "down_proj" in part.hf_name]
    other = [torch.zeros_like(views[0]), torch.zeros_like(views[0])]
    torch.distributed.all_gather(other, views[0].contiguous())
    views[0].copy_(other[0])
    named = {part.hf_name: part.view for part in parts.parts}
    try:
        publisher._compare(ready, sources, [named[piece.name] for piece in ready.slices])
    except EngineError as error:
        return str(error)
    return ""


def test_a_slice_of_the_neighbour_is_named_with_its_rank():
    for message in run_ranks(2, swap):
        lines = [line for line in message.splitlines() if "_proj" in line or "norm" in line or "embed" in line]
        assert len(lines) == 1
        assert "down_proj.weight ((0, 16), (8, 16)) on generator rank 1" in lines[0]


def separate_devices() -> tuple:
    """Ranks 0 and 1 only train, ranks 2 and 3 only generate (tp 2)."""
    rank = torch.distributed.get_rank()
    colocated = two_ranks_slices()
    nobody = (None, None)
    tables = intern(
        {
            **{(at, "owned"): piece.owned + nobody for at, piece in enumerate(colocated)},
            **{(at, "needed"): nobody + piece.needed for at, piece in enumerate(colocated)},
        }
    )
    slices = [
        Slice(piece.name, 0, piece.dtype, piece.itemsize, tables[at, "owned"], tables[at, "needed"])
        for at, piece in enumerate(colocated)
    ]
    full, told = full_weights(MODEL.shapes), []
    parts = parts_of(slices, MODEL.shapes, rank, torch.float32)
    shards = shards_of(slices, full, rank) if rank < 2 else []
    publisher = Publisher(lambda: shards, lambda: parts, told.append, verify="always")
    metrics = publisher.publish(0)
    held = sum(part.view.numel() * 4 for part in parts.parts)
    return len(shards), held, metrics["publish/bytes"], metrics["publish/sent_bytes"], wrong_parts(parts, full), told


def test_trainer_and_generator_may_sit_on_separate_ranks():
    answers = run_ranks(4, separate_devices)
    for rank, (shards, held, received, sent, wrong, told) in enumerate(answers):
        assert (shards > 0, held > 0) == (rank < 2, rank >= 2)
        assert received == held
        assert (sent > 0) == (rank < 2)
        assert wrong == []
        assert told == [NO_VERSION, 0]
