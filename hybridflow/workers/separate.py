"""The two seats of the hybrid engine where actor and generator live in different pools: one sends, one receives.

The plan, the transport and the checks are those of the colocated case (``hybrid_engine/publish.py``); a rank simply has
one side of it only. The driver calls both sides at once: neither can publish alone.

    trainers ---link 0---> replica 0        one link (group, plan, publisher) for every replica of the generator:
             ---link 1---> replica 1        one that dies takes its own link with it, and no other

A rank that fails lets go of its link, so that nobody waits there for it: the peers' collectives end with a closed
connection (gloo; over NCCL with the link's timeout, not run here).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.hybrid_engine.adapters import AdapterPublisher
from hybridflow.hybrid_engine.joint import forget_frames, join_worlds, meeting_point
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.roles.protocols import Broken, Metrics
from hybridflow.utils.errors import StateError
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.publishers import GeneratorSeat, make_publisher
from hybridflow.workers.residence import resident

T = TypeVar("T")

DEADLINE_SHARE = 0.5
"""Of the driver's deadline of a call: a rank that waits for one that is gone gives up before the driver does."""


class Sender:
    """One rank of the trainers' pool. Must be built after the role ``actor`` of the same process.

    What goes wrong on a link is returned, not raised: only the driver knows whether the replica behind it is dead, in
    which case nothing is wrong with this rank.
    """

    def __init__(self, context: RankContext, *, config: PPOConfig) -> None:
        self._context = context
        self._config = config
        self._actor: ActorWorker = context.siblings["actor"]
        self._links: dict[int, Publisher | AdapterPublisher] = {}

    @register(dispatch="RANK_ZERO")
    def meeting(self) -> str:
        """Where the ranks of both sides meet."""
        return meeting_point()

    @register(dispatch="ONE_TO_ALL")
    def join(self, *, link: int, name: str, meeting: str, receivers: int) -> Broken | None:
        """Joins the group ``name`` with a replica, in place of the link's former one; unblocked when all have called.

        Args:
            link: number of the replica.
            name: of the group.
            meeting: where its ranks meet.
            receivers: ranks of the replica.
        """
        self._links.pop(link, None)

        def join() -> None:
            world = self._context.world + receivers
            group = joint_group(self._config, self._context, meeting, name, first=0, world=world)
            self._links[link] = make_publisher(self._config, trainer=self._actor.engine, generator=None, group=group)

        return self._tried(link, join)

    @register(dispatch="ONE_TO_ALL")
    def publish(self, *, link: int, version: int) -> Metrics | Broken:
        """Sends the actor's weights over a link; metrics of this rank. Waits for the replica."""

        def publish() -> Metrics:
            if link not in self._links:
                raise StateError(f"publish was called before replica {link} was joined")
            with resident(self._actor.engine, self._config.actor_rollout_ref.actor.sharding):
                return self._links[link].publish(version)

        return self._tried(link, publish)

    def _tried(self, link: int, action: Callable[[], T]) -> T | Broken:
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - the driver raises it unless the replica is dead
            broken = Broken("".join(traceback.format_exception(error)))
            self._links.pop(link, None)
            forget_frames(error)
        return broken


class Receiver(GeneratorSeat):
    """One rank of a replica. Must be built after the role ``rollout`` of the same process."""

    def __init__(self, context: RankContext, *, config: PPOConfig) -> None:
        super().__init__(context.siblings["rollout"])
        self._context = context
        self._config = config
        self._publisher: Publisher | AdapterPublisher | None = None

    @register(dispatch="ONE_TO_ALL")
    def join(self, *, name: str, meeting: str, senders: int) -> None:
        """Joins the group ``name`` with the trainers; unblocked when every rank of both sides has called."""
        world = senders + self._context.world
        group = joint_group(self._config, self._context, meeting, name, first=senders, world=world)
        self._publisher = make_publisher(self._config, trainer=None, generator=self._rollout.engine, group=group)

    def _publish(self, version: int) -> Metrics:
        try:
            return super()._publish(version)
        except Exception as error:
            self._publisher = None
            forget_frames(error)
            raise

    def _transfer(self, version: int) -> Metrics:
        return joined(self._publisher).publish(version)


def joint_group(
    config: PPOConfig, context: RankContext, meeting: str, name: str, *, first: int, world: int
) -> dist.ProcessGroup:
    """The group of the trainers and a replica, in which this process's rank is ``first`` plus its rank in its pool."""
    timeouts = config.trainer.timeouts
    return join_worlds(
        meeting,
        name,
        rank=first + context.rank,
        world=world,
        device=torch.device(context.device),
        timeout_s=min(
            float(config.actor_rollout_ref.nccl_timeout), DEADLINE_SHARE * min(timeouts.publish_s, timeouts.start_s)
        ),
    )


def joined(made: Publisher | AdapterPublisher | None) -> Publisher | AdapterPublisher:
    """The publisher, which ``join`` makes."""
    if made is None:
        raise StateError("publish was called before the replica was joined to the trainers")
    return made
