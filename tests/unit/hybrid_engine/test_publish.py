"""The publisher in a world of one: checks before writing, atomicity, metrics."""

from __future__ import annotations

import pytest
import torch

from hybridflow.engines.rollout.base import EngineParameters, Part
from hybridflow.engines.train.base import Shard
from hybridflow.hybrid_engine.publish import NO_VERSION, Publisher
from hybridflow.utils.errors import EngineError

EMBED, HEAD, WEIGHT = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"


class Sides:
    """A trainer and a generator of one process, with what the generator was told."""

    def __init__(self, *, rollout_dtype=torch.float32, generated=(EMBED, WEIGHT)):
        generator = torch.Generator().manual_seed(0)
        self.full = {EMBED: torch.randn(6, 4, generator=generator), WEIGHT: torch.randn(8, 4, generator=generator)}
        self.storage = {
            name: torch.zeros_like(self.full.get(name, self.full[EMBED]), dtype=rollout_dtype) for name in generated
        }
        self.told: list[int] = []

    def shards(self):
        return [Shard(n, t, tuple((0, s) for s in t.shape), tuple(t.shape)) for n, t in self.full.items()]

    def parameters(self):
        return EngineParameters(
            tuple(Part(n, t, tuple((0, s) for s in t.shape), tuple(t.shape)) for n, t in self.storage.items())
        )

    def written(self, version):
        self.told.append(version)

    def publisher(self, **settings):
        return Publisher(self.shards, self.parameters(), self.written, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_process_copies_in_place_and_sends_nothing(dtype):
    sides = Sides(rollout_dtype=dtype)
    metrics = sides.publisher(verify="always").publish(3)
    for name, full in sides.full.items():
        assert torch.equal(sides.storage[name], full.to(dtype))
    assert metrics["publish/bytes"] == metrics["publish/peak_extra_bytes"] == metrics["publish/bound_bytes"] == 0
    assert metrics["publish/local_bytes"] == sum(t.numel() for t in sides.full.values()) * dtype.itemsize
    assert sides.told == [3]
