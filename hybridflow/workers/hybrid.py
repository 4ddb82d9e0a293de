"""The weights worker: the 3D-HybridEngine's seat in a process that hosts both the actor and the generator."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.hybrid_engine.adapters import AdapterPublisher
from hybridflow.hybrid_engine.residency import State
from hybridflow.roles.protocols import Metrics
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.publishers import GeneratorSeat, make_publisher
from hybridflow.workers.residence import resident
from hybridflow.workers.rollout import RolloutWorker


class WeightsWorker(GeneratorSeat):
    """One rank of the way from the actor's shards to the generator's slices.

    Must be built after the roles ``actor`` and ``rollout`` of the same process.
    """

    def __init__(self, context: RankContext, *, config: PPOConfig) -> None:
        actor: ActorWorker = context.siblings["actor"]
        rollout: RolloutWorker = context.siblings["rollout"]
        super().__init__(rollout)
        self._actor = actor
        self._sharding = config.actor_rollout_ref.actor.sharding
        self._frees_memory = config.actor_rollout_ref.rollout.free_cache_engine
        actor.make_room = self._put_generator_to_sleep
        self._publisher = make_publisher(config, trainer=actor.engine, generator=rollout.engine)

    def _publish(self, version: int) -> Metrics:
        with resident(self._actor.engine, self._sharding):
            return super()._publish(version)

    def _transfer(self, version: int) -> Metrics:
        return self._publisher.publish(version)

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes of what adapters are merged into on this rank."""
        return {"kept base": self._publisher.held_bytes()} if isinstance(self._publisher, AdapterPublisher) else {}

    def _put_generator_to_sleep(self) -> None:
        residency = self._rollout.residency
        if self._frees_memory and residency.state is State.GENERATING:
            residency.to_training()
