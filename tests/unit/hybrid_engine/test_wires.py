"""Both wires bring the same bytes; shared buckets leave nothing behind, and no rank waits for one that has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridflow.hybrid_engine import wires
from hybridflow.hybrid_engine.layouts import TrainingLayout, predict
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.hybrid_engine.wires import Seat, choose_wire, share_host_bucket
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import EngineError
from tests.ranks import run_ranks
from tests.unit.hybrid_engine.cases import MODELS, full_weights, parts_of, shards_of, wrong_parts

MODEL = MODELS["tied, padded vocabulary"]
BUCKET = 4096
CPU = torch.device("cpu")


def publish_twice(wire: str, tp: int) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    slices = predict(
        MODEL,
        TrainingLayout(dims=ParallelDims(dp_shard=world)),
        ParallelDims(dp_shard=world // tp, tp=tp),
        dtype="bfloat16",
        itemsize=2,
    )
    parts = parts_of(slices, MODEL.shapes, rank, torch.bfloat16)
    now = full_weights(MODEL.shapes)
    publisher = Publisher(
        lambda: shards_of(slices, now, rank),
        lambda: parts,
        lambda version: None,
        bucket_bytes=BUCKET,
        verify="always",
        wire=wire,
    )
    publisher.publish(0)
    now = full_weights(MODEL.shapes, seed=1)
    metrics = publisher.publish(1)
    dist.barrier()
    return {
        "wrong": wrong_parts(parts, now),
        "bytes": metrics["publish/bytes"],
        "rounds": metrics["publish/rounds"],
        "peak": metrics["publish/peak_extra_bytes"],
        "left": [path.name for path in Path("/dev/shm").glob(f"hybridflow-{os.getpid()}-*")],
    }


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (4, 2)])
def test_shared_buckets_bring_what_the_collective_brings(world, tp):
    shared, collective = (run_ranks(world, publish_twice, wire, tp) for wire in ("shared", "collective"))
    for one, other in zip(shared, collective, strict=True):
        assert one["wrong"] == other["wrong"] == [] and one["left"] == []
        assert one["bytes"] == other["bytes"] > 0
        assert one["rounds"] == other["rounds"] > 2  # buckets are used again
        assert one["peak"] <= BUCKET and other["peak"] <= 2 * BUCKET


def no_room_on_rank_one() -> str:
    rank = dist.get_rank()
    if rank == 1:
        wires.SHARED_MEMORY = Path("/no/such/folder")
    slices = predict(MODEL, TrainingLayout(dims=ParallelDims(dp_shard=2)), ParallelDims(tp=2))
    parts = parts_of(slices, MODEL.shapes, rank, torch.bfloat16)
    shards = shards_of(slices, full_weights(MODEL.shapes), rank)
    try:
        Publisher(lambda: shards, lambda: parts, lambda version: None, wire="shared").publish(0)
    except EngineError as error:
        return f"{error} {[path.name for path in Path('/dev/shm').glob(f'hybridflow-{os.getpid()}-*')]}"
    return ""


def test_a_rank_without_shared_memory_is_named_on_all_ranks():
    for message in run_ranks(2, no_room_on_rank_one):
        assert "buckets cannot be shared" in message and "rank 1: FileNotFoundError" in message
        assert message.endswith("[]")


def test_a_bucket_is_seen_by_whoever_opens_it_and_has_no_name_afterwards():
    bucket, handle, close = share_host_bucket(16, CPU)
    other = handle.open()
    close()
    bucket.copy_(torch.arange(16, dtype=torch.uint8))
    assert torch.equal(other, bucket)
    assert not Path(handle.path).exists()


def test_a_bucket_that_does_not_fit_is_refused_before_it_is_written():
    free = os.statvfs("/dev/shm")
    with pytest.raises(OSError, match="No space left"):
        share_host_bucket(2 * free.f_blocks * free.f_frsize, CPU)


@pytest.mark.parametrize(
    ("devices", "sees_all", "free", "wire"),
    [
        (["cpu"], True, 1 << 30, "collective"),  # alone: nothing travels
        (["cpu", "cpu"], True, 1 << 30, "shared"),
        (["cpu", "cpu"], False, 1 << 30, "collective"),  # other machines, or containers with their own /dev/shm
        (["cpu", "cpu"], True, 1 << 20, "collective"),  # a container's small /dev/shm
        (["gpu-a", "gpu-b"], True, 1 << 30, "collective"),  # NCCL
        (["gpu-a", "gpu-b", "gpu-a"], True, 1 << 30, "shared"),  # NCCL refuses two ranks on a device
    ],
)
def test_the_wire_follows_from_where_ranks_sit(devices, sees_all, free, wire):
    assert choose_wire([Seat(device, sees_all, free) for device in devices], bucket_bytes=64 << 20) == wire
