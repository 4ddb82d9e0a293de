"""Replicas of a generator, each a group of its own: one that dies is started again and its rows are done again.

    call(rows) -> rows 0..a to replica 0 | rows a..b to replica 1 | ...      (a replica's world is its own)
    replica 1 dies -> a new one is opened, whoever waits -> it is welcomed (gets the weights) -> rows a..b go to it

One that lets the deadline of a call pass hangs: it is killed, and counts as dead. When the one in its place is as late
with the same call, the deadline is too short for the work, and that is raised.

A row's result must depend on the row alone (a request's seed is made of step, prompt and sample): rows that are done
again then come out as they would have the first time, and the trainer that waits notices nothing but time. What a
replica made does not die with it: rows are taken over as soon as they are there (``hold``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from hybridflow.batch.batch import Batch, concat
from hybridflow.batch.futures import Pending
from hybridflow.dispatch.group import Fetched, WorkerGroup
from hybridflow.single_controller import health
from hybridflow.single_controller.pace import Pace
from hybridflow.utils.errors import DeadlineError, LostError

log = logging.getLogger(__name__)

NOTICE_S = 3.0
"""How long after a loss a dead process is looked for before the replica counts as alive."""
POLL_S = 0.05


class Replica(WorkerGroup, health.Mortal, Protocol):
    """A worker group whose processes can die, or stop."""

    def first_loss(self) -> str | None:
        """What died, or let a deadline pass, as text; None: nothing."""
        ...


class ReplicaGroup:
    """A ``WorkerGroup`` over groups that can be replaced one by one.

    A call with a batch is split by rows, in order; any other call goes to every replica and its results are one list,
    rank by rank where each replica answers by rank. The answer of a single replica is given as it is.

    Args:
        open_replica: opens the replica of this number without waiting for it; the first start and every later one.
        count: replicas.
        restarts: how many deaths of each replica are made good in the life of this group.
        hold: rows that a replica made, kept where its death does not reach them.
        name: shown in errors.
    """

    def __init__(
        self,
        open_replica: Callable[[int], Replica],
        count: int,
        *,
        restarts: int,
        hold: Callable[[Batch], Batch] = Batch.fetched,
        name: str = "replicas",
    ) -> None:
        self.name = name
        self.restarted = 0
        """Replicas that were started again so far."""
        self.welcome: Callable[[int, WorkerGroup], None] = _nothing
        """Gives the replica of this number what it must hold before any call goes to it."""
        self.hold = hold
        self._open = open_replica
        self._restarts = restarts
        self._deaths: Counter[int] = Counter()
        self._lock = threading.RLock()
        self._lost: str | None = None
        self._new = set(range(count))
        self._pace = Pace()
        self._replicas: list[Replica] = []
        try:
            for number in range(count):
                self._replicas.append(self._opened(number))
        except BaseException:  # a signal at the start, too, must not leave the first ones behind
            self.shutdown()
            raise
        health.enlist(self)

    @property
    def world(self) -> int:
        """Ranks of all replicas."""
        return sum(replica.world for replica in self._replicas)

    @property
    def count(self) -> int:
        """Replicas."""
        return len(self._replicas)

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """See ``WorkerGroup.call``; a replica that dies before its answer is replaced and called again."""
        return _Shared(self, role, method, args, kwargs)

    def wait_ready(self) -> None:
        """See ``WorkerGroup.wait_ready``; a replica that dies meanwhile is started again. None is welcomed yet."""
        for number in range(self.count):
            self._wait_ready(number)

    def standing(self, number: int) -> Replica | None:
        """The replica of this number; None while it is new: it must be welcomed first."""
        return None if number in self._new else self._replicas[number]

    def ready(self, number: int) -> Replica:
        """The replica of this number, once it stands and was welcomed."""
        while number in self._new:
            replica = self._wait_ready(number)
            try:
                self.welcome(number, replica)
            except (LostError, DeadlineError) as error:
                self.make_good(number, replica, error)
            else:
                with self._lock:
                    if self._replicas[number] is replica:
                        self._new.discard(number)
        return self._replicas[number]

    def lives(self, number: int, replica: WorkerGroup) -> bool:
        """Whether this replica, of which something was lost, has all its processes and none of them hangs."""
        until = time.monotonic() + NOTICE_S
        while self._replicas[number] is replica and self._replicas[number].first_loss() is None:
            if time.monotonic() > until:
                return True
            time.sleep(POLL_S)
        return False

    def make_good(self, number: int, replica: WorkerGroup, error: LostError | DeadlineError) -> None:
        """Another replica, still new, stands in the place of this one, which ``error`` says is dead or hangs.

        Raises:
            LostError, DeadlineError: ``error`` itself, when the replica lives and the loss is not its own.
            LostError: no restart is left.
        """
        if self._lost is None and self.lives(number, replica):
            raise error
        self._replace(number, replica, str(error))

    def first_death(self) -> str | None:
        """A loss that cannot be made good, as text. Any other leads to a new process at once, whoever waits here."""
        for number, replica in enumerate(tuple(self._replicas)):
            if (text := replica.first_loss()) is not None:
                try:
                    self._replace(number, replica, text)
                except LostError as error:
                    return str(error)
        return self._lost

    def keep_stacks(self) -> None:
        """Stacks of all replicas, where each writes its own."""
        for replica in self._replicas:
            replica.keep_stacks()

    def took(self, method: str, seconds: Mapping[int, float]) -> None:
        """Notes how long each replica took for a call."""
        behind = self._pace.took(method, seconds)
        if behind is not None:
            number, longest, others_s = behind
            log.warning(
                "straggler: replica %d of group %r took %.1f s for %s, the others %.1f s (median); shown once",
                number, self.name, longest, method, others_s,
            )  # fmt: skip

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
        """See ``WorkerGroup.stragglers``: within replicas and among them; the worst."""
        worst = self._pace.take_ratios()
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
        health.dismiss(self)
        for replica in self._replicas:
            replica.shutdown()

    def _opened(self, number: int) -> Replica:
        replica = self._open(number)
        health.dismiss(replica)  # its death is ours to make good: waits on other groups go on
        return replica

    def _wait_ready(self, number: int) -> Replica:
        while True:
            replica = self._replicas[number]
            try:
                replica.wait_ready()
            except LostError as error:
                self.make_good(number, replica, error)
            else:
                return replica

    def _replace(self, number: int, dead: WorkerGroup, reason: str) -> None:
        with self._lock:
            if self._replicas[number] is not dead:  # somebody else who waits has noticed it before
                return
            if self._lost is None and self._deaths[number] == self._restarts:
                self._lost = f"replica {number} of group {self.name!r} is lost and no restart is left: {reason}"
            if self._lost is not None:
                raise LostError(self._lost)
            self._deaths[number] += 1
            self.restarted += 1
            log.error("replica %d of group %r is started again (%d of %d): %s",
                      number, self.name, self._deaths[number], self._restarts, reason)  # fmt: skip
            dead.shutdown()
            self._new.add(number)
            self._replicas[number] = self._opened(number)

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
        count = group.count
        self._shares = [
            (tuple(_part(value, i, count) for value in args), {k: _part(v, i, count) for k, v in kwargs.items()})
            for i in range(count)
        ]
        self._sent: list[tuple[WorkerGroup, Pending[Any]] | None] = [self._send(number) for number in range(count)]
        self._results: list[Any] = []
        self._late: set[int] = set()

    def wait(self) -> Any:
        """See ``Pending.wait``: rows in their order, or the results of all replicas."""
        for number in range(len(self._results), len(self._shares)):
            self._results.append(self._result(number))
            if number + 1 == len(self._shares):
                self._group.took(self._method, dict(enumerate(self._seconds())))
        if len(self._results) == 1:
            return self._results[0]
        if self._has_rows:
            return _joined(self._results)
        by_rank = all(isinstance(result, list) for result in self._results)
        return list(chain.from_iterable(self._results)) if by_rank else list(self._results)

    @property
    def seconds(self) -> float:
        """See ``Pending.seconds``: of the slowest replica."""
        return max(self._seconds())

    def _seconds(self) -> list[float]:
        return [sent[1].seconds for sent in self._sent if sent is not None]

    def _send(self, number: int) -> tuple[WorkerGroup, Pending[Any]] | None:
        """The call on one replica; None where it is new, or known to be dead already: ``wait`` calls it."""
        replica = self._group.standing(number)
        if replica is None:
            return None
        args, kwargs = self._shares[number]
        try:
            return replica, replica.call(self._role, self._method, *args, **kwargs)
        except LostError:
            return None

    def _result(self, number: int) -> Any:
        while True:
            replica = self._group.ready(number)
            try:
                sent = self._sent[number]
                if sent is None or sent[0] is not replica:
                    args, kwargs = self._shares[number]
                    sent = self._sent[number] = (replica, replica.call(self._role, self._method, *args, **kwargs))
                result = sent[1].wait()
                return self._held(result) if self._has_rows else result
            except DeadlineError as error:
                if number in self._late:  # a new process was as late: it is the deadline that is short
                    raise
                self._late.add(number)
                self._group.make_good(number, replica, error)
            except LostError as error:
                self._group.make_good(number, replica, error)

    def _held(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self._held(part) for part in result)
        return self._group.hold(result) if isinstance(result, Batch) else result


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


def _nothing(number: int, replica: WorkerGroup) -> None:
    """A replica that needs nothing."""
