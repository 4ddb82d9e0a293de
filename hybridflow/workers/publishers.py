"""Which publisher a run has, with this process's sides of it, and when it publishes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import torch.distributed as dist

from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.register import register
from hybridflow.engines.rollout.base import EngineParameters, InFlight, RolloutEngine
from hybridflow.engines.train.base import Shard, TrainEngine
from hybridflow.hybrid_engine.adapters import AdapterPublisher
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.hybrid_engine.residency import State
from hybridflow.roles.protocols import Metrics
from hybridflow.workers.rollout import RolloutWorker


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


class GeneratorSeat(ABC):
    """Publishes to the generator of this process, when called or before that between two of its steps.

    Base of what sits beside a generator.
    """

    def __init__(self, rollout: RolloutWorker) -> None:
        self._rollout = rollout
        self._early: tuple[int, Metrics] | None = None
        rollout.publish = self._publish_early

    @register(dispatch="ONE_TO_ALL")
    def publish(self, *, version: int) -> Metrics:
        """Brings the actor's weights into the generator; metrics of this rank. Waits for the other ranks.

        Where ``PublishNow`` has done so between two steps of a generation before this call's turn, its metrics.
        """
        early, self._early = self._early, None
        return early[1] if early is not None and early[0] == version else self._publish(version)

    def _publish_early(self, version: int) -> None:
        """What the rollout worker calls between two engine steps, on every rank of an engine after the same one."""
        self._early = version, self._publish(version)

    def _publish(self, version: int) -> Metrics:
        residency = self._rollout.residency
        if residency.state is State.TRAINING:
            return residency.to_generating(lambda: self._transfer(version))
        return residency.publish_while_generating(lambda: self._transfer(version))

    @abstractmethod
    def _transfer(self, version: int) -> Metrics:
        """The transfer itself."""
