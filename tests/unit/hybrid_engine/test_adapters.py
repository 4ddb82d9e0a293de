"""Adapters travel alone: few bytes, the same weights, no drift."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engines.rollout.base import NO_VERSION
from hybridflow.engines.train.base import Shard
from hybridflow.hybrid_engine.adapters import AdapterPublisher
from hybridflow.hybrid_engine.boxes import extents, full_box, volume, within
from hybridflow.hybrid_engine.layouts import TrainingLayout, predict
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import EngineError
from tests.ranks import run_ranks
from tests.unit.hybrid_engine.cases import MODELS, full_weights, held_bytes, parts_of, shards_of, wrong_parts

MODEL = MODELS["grouped-query, biased"]
RANK, SCALE, BUCKET = 2, 0.5, 2048
ADAPTED = [name for name in MODEL.shapes if name.endswith("_proj.weight")]


def adapter_weights(seed: int) -> dict[str, Tensor]:
    shapes = {}
    for name in ADAPTED:
        rows, columns = MODEL.shapes[name]
        shapes[name.replace(".weight", ".lora_A.weight")] = (RANK, columns)
        shapes[name.replace(".weight", ".lora_B.weight")] = (rows, RANK)
    return full_weights(shapes, seed=seed)


def chunks(full: Mapping[str, Tensor], rank: int, world: int) -> list[Shard]:
    """FSDP shards of the adapters: rows in ``torch.chunk``'s way."""
    found = []
    for name, whole in full.items():
        size = -(-whole.shape[0] // world)
        low, high = min(rank * size, whole.shape[0]), min((rank + 1) * size, whole.shape[0])
        found.append(Shard(name, whole[low:high].clone(), ((low, high), (0, whole.shape[1])), tuple(whole.shape)))
    return found


def merged(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = dict(base)
    for name in ADAPTED:
        a, b = (adapters[name.replace(".weight", f".lora_{half}.weight")] for half in "AB")
        found[name] = base[name] + SCALE * (b @ a)
    return found


def far_parts(parts, full: Mapping[str, Tensor]) -> list[str]:
    # one product of two small factors per element: sums of 2 terms in another order, and one rounding
    return [
        part.hf_name
        for part in parts.parts
        if not torch.allclose(
            part.view, full[part.hf_name][within(part.hf_box, full_box(part.hf_shape))], atol=1e-6, rtol=1e-6
        )
    ]


def publish_three_times(tp: int) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    generation = ParallelDims(dp_shard=world // tp, tp=tp)
    slices = predict(MODEL, TrainingLayout.permuted(ParallelDims(dp_shard=world), tp), generation, dtype="float32",
                     itemsize=4)  # fmt: skip
    base, told = full_weights(MODEL.shapes), []
    parts = parts_of(slices, MODEL.shapes, rank, torch.float32)
    now = adapter_weights(1)
    asked: list[int] = []

    def stale() -> tuple[str, ...]:
        asked.append(told[-1])
        return ()

    publisher = AdapterPublisher(
        lambda: shards_of(slices, base, rank), lambda: chunks(now, rank, world), lambda: parts, told.append,
        scale=SCALE, rank=RANK, bucket_bytes=BUCKET, verify="always", stale_copies=stale,
    )  # fmt: skip
    first = publisher.publish(0)
    far = far_parts(parts, merged(base, now))
    now = adapter_weights(2)
    publisher.publish(1)
    now = adapter_weights(3)
    last = publisher.publish(2)
    far += far_parts(parts, merged(base, now))
    untouched = [part for part in parts.parts if part.hf_name not in ADAPTED]
    needed = sum(
        4 * RANK * sum(extents(part.hf_box)) for part in parts.parts if part.hf_name in ADAPTED and volume(part.hf_box)
    )
    now = {name: torch.zeros_like(value) for name, value in now.items()}
    publisher.publish(3)
    return {
        "far": far,
        "told": [version for version in told if version != NO_VERSION],
        "asked": asked,
        "first": first["publish/bytes"],
        "last": last["publish/bytes"],
        "ratio": last["publish/ratio_to_bound"],
        "local": last["publish/local_bytes"],
        "peak": max(first["publish/peak_extra_bytes"], last["publish/peak_extra_bytes"]),
        "needed": needed,
        "held": held_bytes(parts),
        # without adapters the storage is the base again, bit for bit, after three other merges
        "drifted": wrong_parts(parts, base),
        "untouched": len(untouched),
    }


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_only_adapters_move_and_the_generator_holds_the_merged_weights(world, tp):
    for found in run_ranks(world, publish_three_times, tp):
        assert found["far"] == [] and found["drifted"] == []
        assert found["told"] == [0, 1, 2, 3]
        assert found["asked"] == [0, 1, 2, 3]  # for stale copies, once adapters are merged: those of the base are stale
        assert found["last"] + found["local"] == found["needed"]  # A and B of what is stored here, nothing else
        assert found["ratio"] == 1.0
        assert found["peak"] <= 2 * BUCKET
        assert found["untouched"] > 0
        if world > tp:
            assert found["last"] < 0.5 * found["first"]


def fail_in_the_second_transfer() -> tuple:
    slices = predict(MODEL, TrainingLayout(dims=ParallelDims()), ParallelDims(), dtype="float32", itemsize=4)
    base, told, broken = full_weights(MODEL.shapes), [], [True]
    parts = parts_of(slices, MODEL.shapes, 0, torch.float32)

    def adapters() -> list[Shard]:
        found = chunks(adapter_weights(1), 0, 1)
        at = found[0]
        return [Shard(at.name, at.local.to("meta"), at.box, at.shape), *found[1:]] if broken else found

    publisher = AdapterPublisher(
        lambda: shards_of(slices, base, 0), adapters, lambda: parts, told.append, scale=SCALE, rank=RANK
    )
    try:
        publisher.publish(0)
    except EngineError as error:
        message = str(error)
    held = told[-1]
    broken.clear()
    publisher.publish(1)
    return message, held, told, far_parts(parts, merged(base, adapter_weights(1)))


def test_a_base_whose_adapters_did_not_arrive_is_no_version():
    message, held, told, far = run_ranks(1, fail_in_the_second_transfer)[0]
    assert "moving weights" in message
    assert held == NO_VERSION and 0 not in told and told[-1] == 1
    assert far == []
