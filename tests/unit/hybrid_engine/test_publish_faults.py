"""A publish that breaks at any place leaves no mixture to sample from, and the next one succeeds.

The places are the copies that a publish makes: *cast* (a training block into a bucket), *write* (a bucket into the
generator's storage) and *local* (a block that stays on its rank). Blocks and storage are tensors that count them and
fail at a chosen one, so every bucket is broken once in every way.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybridflow.engines.rollout.base import EngineParameters, Part
from hybridflow.engines.train.base import Shard
from hybridflow.hybrid_engine.layouts import TrainingLayout, predict
from hybridflow.hybrid_engine.publish import NO_VERSION, Publisher
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import EngineError
from tests.ranks import run_ranks
from tests.unit.hybrid_engine.cases import full_weights, parts_of, shards_of, tiny_shapes, wrong_parts

MODEL = tiny_shapes(layers=1, hidden=16, inner=16, heads=4, kv_heads=4)
BUCKET_BYTES = 128


class Fuse:
    """Which copy fails, and how."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.kind, self.at, self.times = "", -1, 0
        self.act = self.fail

    def arm(self, kind: str, at: int, times: int = 1) -> None:
        self.counts.clear()
        self.kind, self.at, self.times = kind, at, times

    def copied(self, kind: str) -> None:
        number = self.counts[kind]
        self.counts[kind] += 1
        if self.times and kind == self.kind and number == self.at:
            self.times -= 1
            self.act()

    def fail(self) -> None:
        raise OSError(f"{self.kind} {self.at}")


FUSE = Fuse()


class Counted(torch.Tensor):
    """A tensor whose copies, from it or into it, go through the fuse of its process."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            into, out_of = (isinstance(one, Counted) for one in args[:2])
            FUSE.copied("local" if into and out_of else "write" if into else "cast")
        return super().__torch_function__(func, types, args, kwargs or {})


class Side:
    """Trainer and generator of this rank: ``tp`` generation ranks to a replica, FSDP over all ranks."""

    def __init__(self, tp: int) -> None:
        world, self.rank = dist.get_world_size(), dist.get_rank()
        layout = TrainingLayout(dims=ParallelDims(dp_shard=world))
        generation = ParallelDims(dp_shard=world // tp, tp=tp)
        self.slices = predict(MODEL, layout, generation, dtype="bfloat16", itemsize=2)
        self.now = full_weights(MODEL.shapes)
        self.plain = parts_of(self.slices, MODEL.shapes, self.rank, torch.bfloat16)
        views = [part.view.as_subclass(Counted) for part in self.plain.parts]
        self.counted = EngineParameters(
            tuple(
                Part(part.hf_name, view, part.hf_box, part.hf_shape)
                for part, view in zip(self.plain.parts, views, strict=True)
            )
        )
        self.told: list[int] = []

    def shards(self) -> list[Shard]:
        return [
            Shard(shard.name, shard.local.as_subclass(Counted), shard.box, shard.shape)
            for shard in shards_of(self.slices, self.now, self.rank)
        ]

    def publisher(self, **settings) -> Publisher:
        return Publisher(self.shards, lambda: self.counted, self.written, **{"bucket_bytes": BUCKET_BYTES, **settings})

    def written(self, version: int) -> None:
        if version == NO_VERSION:
            FUSE.counts.clear()  # before a try, which counts from 0
        self.told.append(version)

    def train(self, seed: int) -> None:
        self.now = full_weights(MODEL.shapes, seed)

    def wrong(self) -> list[str]:
        return wrong_parts(self.plain, self.now)


def break_everywhere() -> dict:
    """Rank 1 fails at every copy of every kind; once, and (at every fifth) in both tries."""
    side = Side(tp=2)
    publisher = side.publisher(verify="always")
    FUSE.arm("", -1)
    rounds = publisher.publish(0)["publish/rounds"]
    copies = dict(FUSE.counts)
    found: dict = {"rounds": rounds, "copies": copies, "bad": [], "broken": 0, "retried": 0}
    version = 1
    # Both ranks follow rank 1's counts: they publish as often.
    everyone: list = [None, None]
    dist.all_gather_object(everyone, copies)
    for kind, count in everyone[1].items():
        for at in range(0, count, 5 if kind == "local" else 1):  # local copies touch no bucket
            for times in (1, 2) if at % 5 == 0 else (1,):
                side.train(version)
                side.told.clear()
                FUSE.arm(kind if side.rank == 1 else "", at, times)
                message, retries = "", -1.0
                try:
                    retries = publisher.publish(version)["publish/retries"]
                except EngineError as error:
                    message = str(error)
                if times == 1:
                    found["retried"] += 1
                    right = retries == 1 and side.told == [NO_VERSION, NO_VERSION, version] and not side.wrong()
                else:
                    found["broken"] += 1
                    right = (
                        f"rank 1: OSError: {kind} {at}" in message
                        and "while moving weights" in message
                        and side.told == [NO_VERSION] * 3
                        and publisher.version == NO_VERSION
                    )
                    version += 1
                    side.train(version)
                    right = right and publisher.publish(version)["publish/retries"] == 0 and not side.wrong()
                if not right:
                    found["bad"].append((kind, at, times, retries, message, list(side.told), side.wrong()[:2]))
                version += 1
    return found


def test_a_publish_broken_at_any_copy_is_repeated_or_leaves_no_version_and_the_next_succeeds():
    for found in run_ranks(2, break_everywhere):
        assert found["bad"] == []
        assert found["rounds"] >= 5  # several buckets, all of them broken in turn
        assert set(found["copies"]) == {"cast", "write", "local"}
        assert min(found["copies"]["cast"], found["copies"]["write"]) >= found["rounds"]
        assert found["broken"] >= 6
        assert found["retried"] >= 2 * found["rounds"]


def refuse_caches() -> tuple:
    """Rank 1's generator refuses its new version in the first try, after it has taken it on rank 0."""
    side, refusals = Side(tp=2), [True]

    def written(version: int) -> None:
        if side.rank == 1 and version >= 0 and refusals:
            refusals.pop()
            raise EngineError("the KV cache was not dropped")
        side.told.append(version)

    publisher = Publisher(side.shards, lambda: side.counted, written, bucket_bytes=BUCKET_BYTES)
    return publisher.publish(7)["publish/retries"], side.told, side.wrong()


def test_a_generator_that_took_the_version_loses_it_when_another_did_not():
    first, second = run_ranks(2, refuse_caches)
    assert first == (1, [NO_VERSION, 7, NO_VERSION, 7], [])
    assert second == (1, [NO_VERSION, NO_VERSION, 7], [])


def die_midway(kind: str) -> tuple:
    """Rank 1 is gone at a copy in the middle; rank 0 goes on alone, as after a restart from a checkpoint."""
    side = Side(tp=1)
    publisher = side.publisher()
    FUSE.arm("", -1)
    publisher.publish(0)
    middle = FUSE.counts[kind] // 2
    side.train(1)
    side.told.clear()
    FUSE.act = lambda: os._exit(1)
    FUSE.arm(kind if side.rank == 1 else "", middle)
    message = ""
    try:
        publisher.publish(1)
    except EngineError as error:
        message = str(error)
    told, held = list(side.told), publisher.version
    dist.destroy_process_group()
    whole = [
        Shard(name, value, tuple((0, n) for n in value.shape), tuple(value.shape)) for name, value in side.now.items()
    ]
    Publisher(lambda: whole, lambda: side.counted, side.told.append).publish(2)
    return message, told, held, side.told, side.wrong()


@pytest.mark.parametrize("kind", ["cast", "write"])
def test_a_rank_that_dies_midway_leaves_the_others_without_a_version_and_they_can_publish_again(kind):
    survivor, dead = run_ranks(2, die_midway, kind, may_die=(1,))
    message, told, held, told_later, wrong = survivor
    assert "publish broke off while moving weights: the ranks cannot talk any more" in message
    assert told == [NO_VERSION, NO_VERSION]
    assert held == NO_VERSION
    assert told_later[-1] == 2
    assert wrong == []
    assert dead is None


def come_late() -> tuple:
    """Rank 1 stands still for longer than the group waits; both publish again over a new group."""
    side = Side(tp=2)
    hasty = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    publisher = side.publisher(group=hasty)
    publisher.publish(0)
    side.train(1)
    side.told.clear()
    FUSE.act = lambda: time.sleep(3)
    FUSE.arm("write" if side.rank == 1 else "", 3)
    message, started = "", time.monotonic()
    try:
        publisher.publish(1)
    except EngineError as error:
        message = str(error)
    waited, told = time.monotonic() - started, list(side.told)
    dist.barrier()
    side.publisher(group=dist.new_group([0, 1]), verify="always").publish(2)
    return message, waited, told, side.told[-1], side.wrong()


def test_a_publish_that_runs_into_the_timeout_breaks_off_on_every_rank_and_a_new_group_publishes():
    for message, waited, told, last, wrong in run_ranks(2, come_late):
        assert "publish broke off while" in message
        assert waited < 10
        assert set(told) == {NO_VERSION}
        assert last == 2
        assert wrong == []
