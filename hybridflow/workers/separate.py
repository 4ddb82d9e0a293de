"""The two seats of the hybrid engine where actor and generator live in different pools: one sends, one receives.

The plan, the transport and the checks are those of the colocated case (``hybrid_engine/publish.py``); a rank simply has
one side of it only. The driver calls both pools at once: neither can publish alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.hybrid_engine.adapters import AdapterPublisher
from hybridflow.hybrid_engine.joint import join_worlds, meeting_point
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.hybrid_engine.residency import State
from hybridflow.roles.protocols import Metrics
from hybridflow.utils.errors import StateError
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.publishers import make_publisher
from hybridflow.workers.residence import resident
from hybridflow.workers.rollout import RolloutWorker


class Sender:
    """One rank of the trainers' pool. Must be built after the role ``actor`` of the same process."""

    def __init__(self, context: RankContext, *, config: PPOConfig) -> None:
        self._context = context
        self._config = config
        self._actor: ActorWorker = context.siblings["actor"]
        self._publisher: Publisher | AdapterPublisher | None = None

    @register(dispatch="RANK_ZERO")
    def meeting(self) -> str:
        """Where the ranks of both pools meet."""
        return meeting_point()

    @register(dispatch="ONE_TO_ALL")
    def join(self, *, meeting: str, senders: int, receivers: int) -> None:
        """Joins the group of both pools; unblocked when every rank of both has called."""
        group = joint_group(self._config, self._context, meeting, first=0, world=senders + receivers)
        self._publisher = make_publisher(self._config, trainer=self._actor.engine, generator=None, group=group)

    @register(dispatch="ONE_TO_ALL")
    def publish(self, *, version: int) -> Metrics:
        """Sends the actor's weights; metrics of this rank. Waits for the receivers."""
        with resident(self._actor.engine, self._config.actor_rollout_ref.actor.sharding):
            return joined(self._publisher).publish(version)


class Receiver:
    """One rank of the generator's pool. Must be built after the role ``rollout`` of the same process."""

    def __init__(self, context: RankContext, *, config: PPOConfig) -> None:
        self._context = context
        self._config = config
        self._rollout: RolloutWorker = context.siblings["rollout"]
        self._publisher: Publisher | AdapterPublisher | None = None

    @register(dispatch="ONE_TO_ALL")
    def join(self, *, meeting: str, senders: int, receivers: int) -> None:
        """Joins the group of both pools; unblocked when every rank of both has called."""
        group = joint_group(self._config, self._context, meeting, first=senders, world=senders + receivers)
        self._publisher = make_publisher(self._config, trainer=None, generator=self._rollout.engine, group=group)

    @register(dispatch="ONE_TO_ALL")
    def publish(self, *, version: int) -> Metrics:
        """Receives the actor's weights; metrics of this rank. Waits for the senders."""
        residency = self._rollout.residency
        if residency.state is State.TRAINING:
            return residency.to_generating(lambda: joined(self._publisher).publish(version))
        return residency.publish_while_generating(lambda: joined(self._publisher).publish(version))


def joint_group(config: PPOConfig, context: RankContext, meeting: str, *, first: int, world: int) -> dist.ProcessGroup:
    """The group of both pools, in which this process's rank is ``first`` plus its rank in its pool."""
    return join_worlds(
        meeting,
        rank=first + context.rank,
        world=world,
        device=torch.device(context.device),
        timeout_s=float(config.actor_rollout_ref.nccl_timeout),
    )


def joined(made: Publisher | AdapterPublisher | None) -> Publisher | AdapterPublisher:
    """The publisher, which ``join`` makes."""
    if made is None:
        raise StateError("publish was called before the pools were joined")
    return made
