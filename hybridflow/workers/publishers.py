"""Which publisher a run has, with this process's sides of it."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist

from hybridflow.config.root import PPOConfig
from hybridflow.engines.rollout.base import EngineParameters, InFlight, RolloutEngine
from hybridflow.engines.train.base import Shard, TrainEngine
from hybridflow.hybrid_engine.adapters import AdapterPublisher
from hybridflow.hybrid_engine.publish import Publisher


def make_publisher(
    config: PPOConfig,
    *,
    trainer: TrainEngine | None,
    generator: RolloutEngine | None,
    group: dist.ProcessGroup | None = None,
) -> Publisher | AdapterPublisher:
    """The publisher of this rank.

    Args:
        config: the whole configuration.
        trainer: the actor's engine of this process; None: it only generates.
        generator: the generator of this process; None: it only trains.
        group: ranks that take part; None: all of this process's world.
    """
    model, transfer = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.checkpoint_engine
    in_flight = cast("InFlight", transfer.in_flight)

    def written(version: int) -> None:
        if generator is not None:
            generator.weights_written(version, in_flight)

    parameters = _nothing_stored if generator is None else generator.parameters
    settings: dict[str, Any] = {
        "group": group,
        "bucket_bytes": transfer.update_weights_bucket_megabytes << 20,
        "verify": transfer.verify,
        "attempts": transfer.attempts,
    }
    if generator is not None:
        settings["stale_copies"] = generator.stale_copies
    if model.lora_rank == 0 or model.lora_merge:
        return Publisher(_nothing if trainer is None else trainer.shards, parameters, written, **settings)
    return AdapterPublisher(
        _nothing if trainer is None else trainer.base_shards,
        _nothing if trainer is None else trainer.adapter_shards,
        parameters,
        written,
        scale=model.lora_scale,
        rank=model.lora_rank,
        **settings,
    )


def _nothing() -> tuple[Shard, ...]:
    """Blocks of a rank that only generates."""
    return ()


def _nothing_stored() -> EngineParameters:
    """Storage of a rank that only trains."""
    return EngineParameters(())
