"""Replicas of a generator, each a group of its own: one that dies is started again and its rows are done again.

    call(rows) -> rows 0..a to replica 0 | rows a..b to replica 1 | ...      (a replica's world is its own)
    replica 1 dies -> a new one is opened -> it is welcomed (gets the current weights) -> rows a..b go to it again

A row's result must depend on the row alone (a request's seed is made of step, prompt and sample): rows that are done
again then come out as they would have the first time, and the trainer that waits notices nothing but time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from hybridflow.batch.batch import Batch, concat
from hybridflow.batch.futures import Pending
from hybridflow.dispatch.group import Fetched, WorkerGroup
from hybridflow.single_controller import health
from hybridflow.utils.errors import LostError

log = logging.getLogger(__name__)


class Replica(WorkerGroup, health.Mortal, Protocol):
    """A worker group whose processes can die."""


class ReplicaGroup:
    """A ``WorkerGroup`` over groups that can be replaced one by one.

    A call with a batch is split by rows, in order; any other call goes to every replica and its results are one list,
    rank by rank where each replica answers by rank.

    Args:
        open_replica: opens the replica of this number; the first start and every later one.
        count: replicas.
        welcome: gives a new replica what it must hold before any row goes to it.
        restarts: how many deaths are made good in the life of this group.
        name: shown in errors.
    """

    def __init__(
        self,
        open_replica: Callable[[int], Replica],
        count: int,
        *,
        welcome: Callable[[WorkerGroup], None],
        restarts: int,
        name: str = "replicas",
    ) -> None:
        self.name = name
        self.restarted = 0
        """Replicas that were started again so far."""
        self._open = open_replica
        self.welcome = welcome
        self._restarts = restarts
        self._replicas: list[WorkerGroup] = []
        for number in range(count):
            self._replicas.append(self._opened(number))

    @property
    def world(self) -> int:
        """Ranks of all replicas."""
        return sum(replica.world for replica in self._replicas)

    @property
    def replicas(self) -> Sequence[WorkerGroup]:
        """The living ones, by number."""
        return tuple(self._replicas)

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """See ``WorkerGroup.call``; a replica that dies before its answer is replaced and called again."""
        return _Shared(self, role, method, args, kwargs)

    def wait_ready(self) -> None:
        """See ``WorkerGroup.wait_ready``; a replica that dies while it starts is started again."""
        for number in range(len(self._replicas)):
            try:
                self._replicas[number].wait_ready()
            except LostError as error:
                self.replace(number, self._replicas[number], error)

    def replace(self, number: int, dead: WorkerGroup, error: LostError) -> None:
        """A new replica stands in the place of ``dead`` and was welcomed; nothing when that was done already.

        Raises:
            LostError: no restart is left.
        """
        if self._replicas[number] is not dead:
            return
        dead.shutdown()
        if self.restarted == self._restarts:
            raise LostError(f"replica {number} of group {self.name!r} died and no restart is left: {error}") from error
        self.restarted += 1
        log.error("replica %d of group %r is started again (%d of %d): %s",
                  number, self.name, self.restarted, self._restarts, error)  # fmt: skip
        fresh = self._replicas[number] = self._opened(number)
        try:
            fresh.wait_ready()
            self.welcome(fresh)
        except LostError as again:
            self.replace(number, fresh, again)

    def ping(self, *, timeout_s: float = 10.0) -> dict[int, float]:
        """See ``WorkerGroup.ping``; ranks are numbered over all replicas."""
        return self._by_rank([replica.ping(timeout_s=timeout_s) for replica in self._replicas])

    def dump_stacks(self, *, timeout_s: float = 10.0) -> dict[int, str]:
        """See ``WorkerGroup.dump_stacks``; ranks are numbered over all replicas."""
        return self._by_rank([replica.dump_stacks(timeout_s=timeout_s) for replica in self._replicas])

    def post(self, message: Any, *, rank: int = 0) -> None:
        """See ``WorkerGroup.post``."""
        for replica in self._replicas:
            if rank < replica.world:
                replica.post(message, rank=rank)
                return
            rank -= replica.world
        raise IndexError(f"group {self.name!r} has {self.world} ranks")

    def stragglers(self) -> Mapping[str, float]:
        """See ``WorkerGroup.stragglers``: within replicas; the worst of them."""
        worst: dict[str, float] = {}
        for replica in self._replicas:
            for method, ratio in replica.stragglers().items():
                worst[method] = max(ratio, worst.get(method, 0.0))
        return worst

    def bytes_moved(self) -> int:
        """See ``WorkerGroup.bytes_moved``."""
        return sum(replica.bytes_moved() for replica in self._replicas)

    def bytes_fetched(self) -> Fetched:
        """See ``WorkerGroup.bytes_fetched``."""
        return sum((replica.bytes_fetched() for replica in self._replicas), Fetched())

    def keep(self, batch: Batch) -> Batch:
        """See ``WorkerGroup.keep``."""
        return self._replicas[0].keep(batch)

    def shutdown(self) -> None:
        """See ``WorkerGroup.shutdown``."""
        for replica in self._replicas:
            replica.shutdown()

    def _opened(self, number: int) -> WorkerGroup:
        replica = self._open(number)
        health.dismiss(replica)  # its death is ours to make good: waits on other groups go on
        return replica

    def _by_rank(self, answers: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
        found, first = {}, 0
        for replica, by_rank in zip(self._replicas, answers, strict=True):
            found |= {first + rank: answer for rank, answer in by_rank.items()}
            first += replica.world
        return found


class _Shared(Pending[Any]):
    """One call on all replicas."""

    def __init__(
        self, group: ReplicaGroup, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._group = group
        self._role = role
        self._method = method
        self._has_rows = any(isinstance(value, Batch) for value in (*args, *kwargs.values()))
        count = len(group.replicas)
        self._shares = [
            (tuple(_part(value, i, count) for value in args), {k: _part(v, i, count) for k, v in kwargs.items()})
            for i in range(count)
        ]
        self._sent: list[tuple[WorkerGroup, Pending[Any]] | None] = [self._send(number) for number in range(count)]
        self._results: list[Any] = []

    def wait(self) -> Any:
        """See ``Pending.wait``: rows in their order, or the results of all replicas."""
        for number in range(len(self._results), len(self._shares)):
            self._results.append(self._result(number))
        if self._has_rows:
            return _joined(self._results)
        by_rank = all(isinstance(result, list) for result in self._results)
        return list(chain.from_iterable(self._results)) if by_rank else list(self._results)

    @property
    def seconds(self) -> float:
        """See ``Pending.seconds``: of the slowest replica."""
        return max(sent[1].seconds for sent in self._sent if sent is not None)

    def _send(self, number: int) -> tuple[WorkerGroup, Pending[Any]] | None:
        """The call on one replica; None where it is known to be dead already."""
        replica = self._group.replicas[number]
        args, kwargs = self._shares[number]
        try:
            return replica, replica.call(self._role, self._method, *args, **kwargs)
        except LostError:
            return None

    def _result(self, number: int) -> Any:
        while True:
            replica = self._group.replicas[number]
            try:
                sent = self._sent[number]
                if sent is None or sent[0] is not replica:
                    args, kwargs = self._shares[number]
                    sent = self._sent[number] = (replica, replica.call(self._role, self._method, *args, **kwargs))
                return sent[1].wait()
            except LostError as error:
                self._group.replace(number, replica, error)


def _part(value: Any, number: int, count: int) -> Any:
    """Rows of replica ``number``: as even as they come, in order; what is no batch goes to all."""
    if not isinstance(value, Batch):
        return value
    first, last = (len(value) * bound // count for bound in (number, number + 1))
    return value.rows(slice(first, last))


def _joined(results: Sequence[Any]) -> Any:
    """Results of consecutive rows as one."""
    if isinstance(results[0], Batch):
        return concat(results)
    if isinstance(results[0], tuple):
        return tuple(_joined(parts) for parts in zip(*results, strict=True))
    return list(results)
