"""The way from the actor's weights to a generator in another pool: replica by replica, each over a link of its own.

    publish(v) -> replica 0: both sides of link 0 at once -> replica 1: both sides of link 1 -> ...
    a replica dies, at any moment -> its successor joins the trainers -> gets v, or the version published last

The handle remembers the version, and so a new replica holds the current one before it serves. Weights of the actor and
that version are the same whenever the generator is called: an update is followed by a publish.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from hybridflow.batch.futures import Pending
from hybridflow.dispatch.group import WorkerGroup
from hybridflow.roles.handles import combine_ranks
from hybridflow.roles.protocols import Broken, Metrics, PublishNow
from hybridflow.utils.errors import DeadlineError, LostError, WorkerError

logger = logging.getLogger(__name__)


class Replicas(Protocol):
    """Groups of the generator that are replaced one by one when they die (``single_controller.replicas``)."""

    @property
    def count(self) -> int:
        """Replicas."""
        ...

    @property
    def restarted(self) -> int:
        """Replicas that were started again so far."""
        ...

    def standing(self, number: int) -> WorkerGroup | None:
        """The replica of this number; None while it is new and was not welcomed."""
        ...

    def ready(self, number: int) -> WorkerGroup:
        """The replica of this number, once it stands and was welcomed."""
        ...

    def lives(self, number: int, replica: WorkerGroup) -> bool:
        """Whether a replica of which something was lost has all its processes, and they answer."""
        ...

    def make_good(self, number: int, replica: WorkerGroup, error: LostError | DeadlineError) -> None:
        """Another replica stands in the place of one that died or hangs. Raises when that cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A call on both sides of one link."""

    method: str
    number: int
    replica: WorkerGroup
    received: Pending[Any]
    sent: Pending[Any]


@dataclass(frozen=True, slots=True)
class _Delivery:
    """Who got which version, and the metrics of both sides by rank."""

    replica: WorkerGroup
    version: int
    metrics: Sequence[Metrics]


class SeparateWeightsHandle:
    """The role ``weights`` where actor and generator live in different pools.

    Args:
        senders: group of the actor.
        receivers: the generator; this handle's ``welcome`` must be what it calls for a new replica.
        role: its name in both.
    """

    def __init__(self, senders: WorkerGroup, receivers: Replicas, role: str) -> None:
        self._senders = senders
        self._receivers = receivers
        self._role = role
        self._version: int | None = None
        self._meeting: str | None = None
        self._joins = 0
        self._deliveries: dict[int, _Delivery] = {}

    def join(self) -> None:
        """Links every replica to the trainers, so that the first publish does not have to."""
        for number in range(self._receivers.count):
            self._receivers.ready(number)

    def publish(self, *, version: int, between_steps: bool = False) -> Pending[Metrics]:
        """See ``roles.protocols.Weights``; runs in ``wait``, but that ``between_steps`` begins at once."""
        self._version = version
        self._deliveries.clear()
        return _Publish(self, version, self._begin_between_steps(version) if between_steps else {})

    def welcome(self, number: int, replica: WorkerGroup) -> None:
        """A new replica, linked to the trainers, with the current version where there is one.

        Raises:
            LostError, DeadlineError: the replica is dead, or hangs.
        """
        if self._meeting is None:
            self._meeting = self._senders.call(self._role, "meeting").wait()
        self._joins += 1  # a group of this name has never been
        shared = {"name": f"{number}.{self._joins}", "meeting": self._meeting}
        to_senders = {"link": number, "receivers": replica.world, **shared}
        self._finish(self._begin("join", number, replica, to_senders, {"senders": self._senders.world, **shared}))
        if self._version is not None:
            self._deliver(self._begin_publish(number, replica, self._version), self._version)

    def deliver_all(self, version: int, begun: Mapping[int, _Exchange]) -> Metrics:
        """On return every replica holds ``version``; metrics of the transfer, and the restarts so far."""
        per_replica = [self._delivered(number, version, begun.get(number)) for number in range(self._receivers.count)]
        return {**combine_replicas(per_replica), "rollout/replica_restarts": float(self._receivers.restarted)}

    def _delivered(self, number: int, version: int, exchange: _Exchange | None) -> Metrics:
        while True:
            replica = self._receivers.ready(number) if exchange is None else exchange.replica
            done = self._deliveries.get(number)
            if done is not None and (done.replica, done.version) == (replica, version):  # perhaps by its welcome
                return combine_ranks(done.metrics)
            try:
                self._deliver(exchange or self._begin_publish(number, replica, version), version)
            except (LostError, DeadlineError) as error:
                self._receivers.make_good(number, replica, error)
            exchange = None

    def _begin_between_steps(self, version: int) -> dict[int, _Exchange]:
        """Publishes that replicas take between two of their steps; one that is new gets it when it is welcomed."""
        begun = {}
        for number in range(self._receivers.count):
            replica = self._receivers.standing(number)
            if replica is None:
                continue
            try:
                begun[number] = self._begin_publish(number, replica, version)
                for rank in range(replica.world):  # after the call is queued: who stands still finds its peers there
                    replica.post(PublishNow(version=version), rank=rank)
            except (LostError, DeadlineError) as error:
                if self._receivers.lives(number, replica):
                    raise
                logger.warning("replica %d does not take weights between two steps: %s", number, error)
        return begun

    def _deliver(self, exchange: _Exchange, version: int) -> None:
        metrics = self._finish(exchange)
        self._deliveries[exchange.number] = _Delivery(exchange.replica, version, metrics)

    def _begin_publish(self, number: int, replica: WorkerGroup, version: int) -> _Exchange:
        return self._begin("publish", number, replica, {"link": number, "version": version}, {"version": version})

    def _begin(
        self,
        method: str,
        number: int,
        replica: WorkerGroup,
        to_senders: Mapping[str, Any],
        to_replica: Mapping[str, Any],
    ) -> _Exchange:
        received = replica.call(self._role, method, **to_replica)
        sent = self._senders.call(self._role, method, **to_senders)
        return _Exchange(method, number, replica, received, sent)

    def _finish(self, exchange: _Exchange) -> list[Any]:
        """The answers of the trainers' and the replica's ranks. The trainers are done with it in any case.

        Raises:
            LostError: the replica is dead, or a trainer.
            DeadlineError: the same of one that hangs.
            WorkerError: of whichever side failed first.
        """
        try:
            answers = exchange.received.wait()
        except (WorkerError, DeadlineError) as error:
            broken = self._broken(exchange, exchange.sent.wait())
            only_lost_its_peers = isinstance(error, LostError) and self._receivers.lives(
                exchange.number, exchange.replica
            )
            if broken is not None and only_lost_its_peers:
                raise broken from error
            raise
        outcomes = exchange.sent.wait()
        broken = self._broken(exchange, outcomes)
        if broken is not None:
            raise broken
        return [*outcomes, *answers]

    def _broken(self, exchange: _Exchange, outcomes: Sequence[Any]) -> WorkerError | None:
        """What went wrong on the trainers' side; None: nothing."""
        reasons = {rank: outcome.reason for rank, outcome in enumerate(outcomes) if isinstance(outcome, Broken)}
        if not reasons:
            return None
        rank, reason = next(iter(reasons.items()))
        return WorkerError(
            f"role {self._role!r}: {exchange.method} to replica {exchange.number} of the generator failed on ranks "
            f"{', '.join(map(str, reasons))} of the trainers\n--- rank {rank}, its traceback ---\n{reason.rstrip()}"
        )


class _Publish(Pending[Metrics]):
    """One publish to all replicas, in turn."""

    def __init__(self, handle: SeparateWeightsHandle, version: int, begun: Mapping[int, _Exchange]) -> None:
        self._handle = handle
        self._version = version
        self._begun = begun
        self._metrics: Metrics | None = None
        self._seconds = 0.0

    def wait(self) -> Metrics:
        """See ``Pending.wait``."""
        if self._metrics is None:
            started = time.perf_counter()
            self._metrics = self._handle.deliver_all(self._version, self._begun)
            self._seconds = time.perf_counter() - started
        return self._metrics

    @property
    def seconds(self) -> float:
        """See ``Pending.seconds``: of all replicas, those included that were started again on the way."""
        return self._seconds


def combine_replicas(per_replica: Sequence[Metrics]) -> Metrics:
    """Metrics of transfers one after the other: sums, but for peaks, rounds, retries and what goes on beside them."""
    combined: dict[str, float] = {}
    for name in dict.fromkeys(chain.from_iterable(per_replica)):
        values = [metrics[name] for metrics in per_replica if name in metrics]
        beside = name.startswith("residency/") and name.endswith("seconds")
        worst = beside or name.endswith(("rounds", "retries")) or "peak" in name
        combined[name] = max(values) if worst else sum(values)
    bound = combined["publish/bound_bytes"]
    combined["publish/ratio_to_bound"] = combined["publish/bytes"] / bound if bound else 1.0
    return combined
