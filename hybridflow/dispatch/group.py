"""What a worker group is, whoever runs it: Ray actors, local processes, or this process.

A group hosts one or more *roles* on the same processes (colocation): every process constructs ``spec.target`` once per
role, as ``Class(context, **spec.kwargs)``, in the order of the specs; later workers find the earlier ones of their
process in ``context.siblings``. A worker with a ``close()`` method has it called at shutdown, last built first.

A hosting process has two lanes. *Work*: one call at a time, in submission order, always in the thread that built the
workers; the only lane that runs collectives or touches tensors. *Control*: answers at any time, touches no tensor:
``ping``, ``dump_stacks``, ``pulse`` (how far a long call has come) and ``post``, which leaves a message in the mailbox
that an engine loop drains between steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import Pending
from hybridflow.topology.parallel import ParallelDims


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One role of a group."""

    role: str
    """Name used in calls and errors: actor, critic, reference, reward, or the user's own."""
    target: str
    """``module:Class`` of the worker, or a dotted path of the user's own."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments; picklable."""
    layouts: Mapping[str, ParallelDims] = field(default_factory=dict)
    """Layout by mesh name (``Registration.mesh``); a mesh that is not named has dp = world."""


class Mailbox:
    """Messages from the control lane to the work lane of one process."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Any] = SimpleQueue()

    def __reduce__(self) -> tuple[type[Mailbox], tuple[()]]:
        """A mailbox that travels arrives empty: messages belong to one process."""
        return Mailbox, ()

    def put(self, message: Any) -> None:
        """Leaves a message; called by the control lane."""
        self._messages.put(message)

    def drain(self) -> list[Any]:
        """All messages since the last call, oldest first; never waits."""
        found = []
        while True:
            try:
                found.append(self._messages.get_nowait())
            except Empty:
                return found


@dataclass(frozen=True, slots=True)
class Beats:
    """How far a rank has come."""

    count: int = 0
    """Steps that ended since its process began."""
    longest_s: float = 0.0
    """The longest of them."""
    expected: bool = False
    """Whether it is in the middle of steps now: without an end of one it hangs."""


class Pulse:
    """Steps that a rank ends within a long call; the work lane writes, the control lane reads.

    It tells a slow call from one that hangs long before the deadline of either.
    """

    def __init__(self) -> None:
        self._beats = Beats()
        self._since = time.monotonic()

    @property
    def beats(self) -> Beats:
        """So far."""
        return self._beats

    def beat(self) -> None:
        """A step has ended."""
        now = time.monotonic()
        longest_s = max(self._beats.longest_s, now - self._since)
        self._beats = Beats(self._beats.count + 1, longest_s, self._beats.expected)
        self._since = now

    @contextmanager
    def expected(self, expected: bool = True) -> Iterator[None]:
        """Inside, steps are expected to end; or, within that again, they are not: the rank waits for others."""
        before = self._expect(expected)
        try:
            yield
        finally:
            self._expect(before)

    def _expect(self, expected: bool) -> bool:
        before = self._beats
        self._beats = Beats(before.count, before.longest_s, expected)
        self._since = time.monotonic()
        return before.expected


class CallRecorder(Protocol):
    """Looks on while a rank carries out its calls."""

    def around(self, role: str, method: str) -> AbstractContextManager[None]:
        """What a call runs in; entered and left in the work lane."""
        ...


class NoRecorder:
    """Nobody looks on."""

    def around(self, role: str, method: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


@dataclass(slots=True, kw_only=True)
class RankContext:
    """What a worker knows about where it runs. torch.distributed's world is initialised before it is built."""

    rank: int
    world: int
    local_rank: int
    """Position among the ranks of this node."""
    node: str
    """Host name or node id, for errors."""
    device: str
    """``cpu`` or ``cuda:i``."""
    threads: int
    """Threads this process may use."""
    siblings: dict[str, Any] = field(default_factory=dict)
    """Workers of this process by role."""
    mailbox: Mailbox = field(default_factory=Mailbox)
    """Messages that ``WorkerGroup.post`` left for this process; shared by all its workers."""
    pulse: Pulse = field(default_factory=Pulse)
    """Where a worker says how far a long call has come; shared by all of this process."""
    recorder: CallRecorder = field(default_factory=NoRecorder)
    """Set by a worker that wants to look on (workers/profiler.py)."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Bytes that ranks read of one another's objects."""

    all: int = 0
    beyond: int = 0
    """Of these, what lay beyond the rows and columns of the calls."""

    def __add__(self, other: Fetched) -> Fetched:
        """Both together."""
        return Fetched(self.all + other.all, self.beyond + other.beyond)


class WorkerGroup(Protocol):
    """Processes that host the same roles on every rank."""

    @property
    def world(self) -> int:
        """Ranks."""
        ...

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Calls a registered method on the ranks that its transfer protocol names; returns at once.

        Calls to one group run in submission order. Batch arguments are split (and padded, and un-padded on collect) by
        the protocol; other arguments go to every rank as they are. Arguments are values: a ``Pending`` is refused, wait
        for it first.

        Wide columns of a result stay on the ranks that made them (batch/refs.py): the batch that comes back refers to
        them, ranks of any group that get it fetch their rows from there, and they are freed with the last batch that
        refers to them. They die with the process that made them.

        Raises (here, before anything is sent):
            ConfigError: no such role, method or protocol.
            ColumnError: a column that the method reads is missing, or row counts differ.
            WorkerError: the group failed before and cannot go on.
        """
        ...

    def wait_ready(self) -> None:
        """Waits until every rank has built its workers; a call may be submitted before.

        Raises:
            WorkerError, DeadlineError: as ``Pending.wait``.
        """
        ...

    def post(self, message: Any, *, rank: int = 0) -> None:
        """Leaves a message in the mailbox of ``rank``, whatever its work lane does."""
        ...

    def ping(self, *, timeout_s: float = 10.0) -> dict[int, float]:
        """Seconds that the control lane of each rank took to answer; a rank that did not answer is missing."""
        ...

    def dump_stacks(self, *, timeout_s: float = 10.0) -> dict[int, str]:
        """Python stacks of all threads of each rank; a rank that did not answer is missing."""
        ...

    def stragglers(self) -> Mapping[str, float]:
        """By method: the slowest rank's time over the others' median, the worst call since this was last asked."""
        ...

    def bytes_moved(self) -> int:
        """Payload bytes that went through the driver since the last call of this method."""
        ...

    def bytes_fetched(self) -> Fetched:
        """Bytes that ranks read of one another's objects since the last call of this method."""
        ...

    def keep(self, batch: Batch) -> Batch:
        """``batch`` with its wide columns where ranks can fetch them, so that they leave the driver once."""
        ...

    def shutdown(self) -> None:
        """Ends every process of the group and frees what it held; may be called twice."""
        ...
