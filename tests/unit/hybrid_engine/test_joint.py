"""A publish between two worlds of processes, each with a torch.distributed of its own."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybridflow.engines.rollout.base import NO_VERSION
from hybridflow.hybrid_engine.boxes import volume
from hybridflow.hybrid_engine.joint import forget_frames, join_worlds, meeting_point
from hybridflow.hybrid_engine.layouts import TrainingLayout, predict, training_table
from hybridflow.hybrid_engine.plan import Slice, intern
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.hybrid_engine.rules import rule_for
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import EngineError
from tests.ranks import run_ranks
from tests.unit.hybrid_engine.cases import MODELS, full_weights, held_bytes, parts_of, shards_of, wrong_parts

MODEL = MODELS["grouped-query, biased"]
CPU = torch.device("cpu")


def two_worlds(trainers: int) -> int:
    """Leaves this process in one of two worlds; its rank in the joint group."""
    joint = dist.get_rank()
    rank, world = (joint, trainers) if joint < trainers else (joint - trainers, dist.get_world_size() - trainers)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if joint == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    if store is None:
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0])}
    own = dist.PrefixStore("trainers" if joint < trainers else "generators", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return joint


def separate_slices(trainers: int, tp: int, world: int) -> list[Slice]:
    """FSDP over the first ranks, a generator of replicas of ``tp`` ranks on the others."""
    generators = world - trainers
    generation = predict(
        MODEL, TrainingLayout(dims=ParallelDims(dp_shard=generators)), ParallelDims(dp_shard=generators // tp, tp=tp),
        dtype="float32", itemsize=4,
    )  # fmt: skip
    layout = TrainingLayout(dims=ParallelDims(dp_shard=trainers))
    tables = {}
    for at, piece in enumerate(generation):
        rule = rule_for(MODEL.architecture, piece.name)
        owned = training_table(piece.name, MODEL.shapes[piece.name], layout, rule)
        tables[at, "owned"] = owned + (None,) * generators
        tables[at, "needed"] = (None,) * trainers + piece.needed
    same = intern(tables)
    return [
        Slice(piece.name, piece.slot, piece.dtype, piece.itemsize, same[at, "owned"], same[at, "needed"])
        for at, piece in enumerate(generation)
    ]


def publish_between(trainers: int, tp: int) -> dict:
    world = dist.get_world_size()
    joint = two_worlds(trainers)
    group = join_worlds(meeting_point(), "0", rank=joint, world=world, device=CPU, timeout_s=60)
    slices = separate_slices(trainers, tp, world)
    full, told = full_weights(MODEL.shapes), []
    parts = parts_of(slices, MODEL.shapes, joint, torch.float32)
    shards = shards_of(slices, full, joint) if joint < trainers else []
    publisher = Publisher(lambda: shards, lambda: parts, told.append, group=group, bucket_bytes=4096, verify="always")
    first, second = publisher.publish(0), publisher.publish(1)
    assert first["publish/bytes"] == second["publish/bytes"]
    own_world = torch.ones(1)
    dist.all_reduce(own_world)
    dist.all_reduce(torch.zeros(1), group=group)  # rank 0 serves the store: nobody may need it after its exit
    return {
        "group": (group.rank(), group.size()),
        "own world": own_world.item(),
        "received": second["publish/bytes"],
        "sent": second["publish/sent_bytes"],
        "peak": second["publish/peak_extra_bytes"],
        "planned": publisher.plan.received_bytes,
        "owned": sum(4 * volume(shard.box) for shard in shards),
        "held": held_bytes(parts),
        "wrong": wrong_parts(parts, full),
        "told": [version for version in told if version != NO_VERSION],
    }


@pytest.mark.parametrize(("trainers", "tp", "world"), [(2, 1, 4), (2, 2, 4), (1, 2, 3)])
def test_generators_of_another_world_receive_exactly_what_they_store(trainers, tp, world):
    answers = run_ranks(world, publish_between, trainers, tp)
    for rank, found in enumerate(answers):
        assert found["group"] == (rank, world)
        assert found["own world"] == (trainers if rank < trainers else world - trainers)
        assert found["wrong"] == [] and found["told"] == [0, 1]
        assert found["received"] == found["held"] == found["planned"]
        assert (found["received"] > 0) == (rank >= trainers)
        assert found["peak"] <= 2 * 4096
    replicas = (world - trainers) // tp
    for found in answers[:trainers]:
        # every replica of the generator takes each shard once; what tensor-parallel ranks share (norms) goes to each
        assert replicas * found["owned"] <= found["sent"] <= 1.2 * replicas * found["owned"]


def fail_on_one_side() -> str:
    joint = two_worlds(1)
    group = join_worlds(meeting_point(), "0", rank=joint, world=2, device=CPU, timeout_s=60)
    slices = separate_slices(1, 1, 2)
    parts = parts_of(slices, MODEL.shapes, joint, torch.float32)
    shards = shards_of(slices, full_weights(MODEL.shapes), joint) if joint == 0 else []

    def refuse(version: int) -> None:
        if joint == 1 and version >= 0:
            raise RuntimeError("out of memory")

    try:
        Publisher(lambda: shards, lambda: parts, refuse, group=group).publish(0)
    except EngineError as error:
        return str(error)
    return ""


def test_a_failure_in_the_generators_world_is_raised_in_the_trainers():
    for message in run_ranks(2, fail_on_one_side):
        assert "rank 1: RuntimeError: out of memory" in message


def lose_the_generator(trainers: int) -> tuple[float, bool] | None:
    """Seconds until this trainer was out of a publish in which the generator died, and what a second group gave."""
    joint = two_worlds(trainers)
    slices = separate_slices(trainers, 1, trainers + 1)
    parts = parts_of(slices, MODEL.shapes, joint, torch.float32)
    shards = shards_of(slices, full_weights(MODEL.shapes), joint) if joint < trainers else []

    def die(version: int) -> None:
        if joint == trainers:
            os.kill(os.getpid(), signal.SIGKILL)

    def publish() -> float:
        group = join_worlds(meeting_point(), "0.1", rank=joint, world=trainers + 1, device=CPU, timeout_s=60)
        publisher = Publisher(lambda: shards, lambda: parts, die, group=group, bucket_bytes=4096)
        begun = time.monotonic()
        try:
            publisher.publish(0)
        except (EngineError, RuntimeError) as error:
            del group, publisher
            forget_frames(error)
            return time.monotonic() - begun
        raise AssertionError("the generator was to die")

    seconds = publish()
    again = join_worlds(meeting_point(), "0.2", rank=joint, world=trainers, device=CPU, timeout_s=60)
    shared = torch.ones(1)
    dist.all_reduce(shared, group=again)
    dist.all_reduce(shared)
    return seconds, shared.item() == trainers**2


def test_trainers_whose_generator_dies_are_free_at_once_and_meet_again():
    """Four trainers: two of them are no neighbours of the dead one, and learn of it from those who have let go."""
    *answers, dead = run_ranks(5, lose_the_generator, 4, may_die=(4,))
    assert dead is None
    for seconds, meets_again in answers:
        assert seconds < 10 and meets_again
