"""Law: the training engine's weights arrive in the transformers generator, bit for bit, on 1 and 2 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.tiny import save_tiny_model


def publish_into_hf(folder: str, tied: bool) -> dict:
    from safetensors.torch import load_file

    from hybridflow.config.actor import RolloutConfig
    from hybridflow.config.model import FSDPConfig, ModelConfig
    from hybridflow.engines.rollout.hf import HFEngine
    from hybridflow.engines.train.fsdp import FSDPEngine
    from hybridflow.hybrid_engine.plan import permuted_order
    from hybridflow.hybrid_engine.publish import Publisher
    from hybridflow.topology.parallel import ParallelDims

    world = dist.get_world_size()
    trainer = FSDPEngine(
        model=ModelConfig(path=folder),
        head="lm",
        sharding=FSDPConfig(),
        dims=ParallelDims(dp_shard=world),
        optim=None,
        shard_order=permuted_order(world, 1),
        row_parallel_shard_dim1=True,
    )
    generator = HFEngine(
        model_path=folder,
        config=RolloutConfig(),
        max_prompt_tokens=8,
        max_response_tokens=8,
        tp=1,
        device="cpu",
        seed=99,
    )
    saved = load_file(f"{folder}/model.safetensors")
    parts = generator.parameters()
    before = sum(torch.equal(part.view, saved[part.hf_name]) for part in parts.parts)
    publisher = Publisher(
        trainer.shards, generator.parameters, generator.weights_written, rollout_dtype="fp32", verify="always"
    )
    metrics = publisher.publish(0)
    return {
        "stale before": len(parts.parts) - before,
        "wrong after": [part.hf_name for part in parts.parts if not torch.equal(part.view, saved[part.hf_name])],
        "version": generator.version,
        "bytes": metrics["publish/bytes"],
        "whole": sum(part.view.nbytes for part in parts.parts),
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_the_trainers_weights_arrive_in_the_generator(tmp_path, world, tied):
    folder = save_tiny_model(tmp_path / "model", tied=tied)
    for answer in run_ranks(world, publish_into_hf, str(folder), tied):
        assert answer["stale before"] > 10  # a negative control: the generator started from other weights
        assert answer["wrong after"] == []
        assert answer["version"] == 0
        assert answer["bytes"] == answer["whole"] * (world - 1) / world  # M (1/t - 1/N) at t = 1; all dims are even
