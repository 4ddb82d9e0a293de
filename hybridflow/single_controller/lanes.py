"""A worker group over any kind of ranks: submission order, deadlines, deaths, and the text of errors.

``Lanes`` is what a kind of ranks must offer (Ray actors, forked processes, this process); ``LaneGroup`` is everything
that does not depend on it. A call waits for all ranks that it reached, because the next one runs behind it on each.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import Pending, Ready
from hybridflow.dispatch.group import Fetched
from hybridflow.dispatch.transfer import Arguments
from hybridflow.single_controller import health
from hybridflow.single_controller.calls import CallTable, PreparedCall
from hybridflow.single_controller.host import START, Failure, Place, Reply, dump_stacks, node_name
from hybridflow.single_controller.pace import Pace, stands_at
from hybridflow.single_controller.vigil import Vigil
from hybridflow.utils.errors import DeadlineError, LostError, StateError, WorkerError

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long the other ranks' failures are waited for once one rank failed, to tell the first from those it caused."""
PEER_GRACE_S = 8.0
"""The same while all that failed are ranks that lost a peer: the death of a node is known later than it is felt."""
STACKS_TIMEOUT_S = 5.0
"""How long ranks may take to say where they stand."""
POLL_S = 0.5
"""How often a wait looks for deaths in other groups; far below the 10 s in which one must be noticed."""
STACKS_S = 3.0
"""How long a stalled call waits for the stacks of its ranks."""
PEER_SIGNS = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "nccl")
"""Texts by which gloo and NCCL complain about a rank that went away: failures of this kind are consequences."""
TIMEOUT_SIGNS = ("timed out waiting", "wait timeout after", "watchdog caught collective operation timeout")
"""Texts by which gloo, torch's store and NCCL complain about a rank that did not come in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """What every kind of group can be told."""

    name: str = "group"
    """Shown in errors."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks, set before torch or a worker module is imported."""
    unset: Sequence[str] = ()
    """Variables that the ranks must not have."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    backend: str = "gloo"
    """Of torch.distributed: ``gloo`` on CPU, ``nccl`` on GPU."""
    start_timeout_s: float = 600.0
    """From the call until every rank has built its workers."""
    collective_timeout_s: float = 600.0
    """torch.distributed's own timeout."""
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """Seconds by method name, counted from when the call could start on its lane."""
    default_deadline_s: float = 3600.0
    """For all other methods."""
    silence_s: float | None = None
    """After how long without a sign of life a rank counts as hanging (``vigil``); None: when the deadline passes."""
    ports: Sequence[int] = (0,)
    """Candidates of the rendezvous port on rank 0's node, tried in order; 0 takes any free one."""
    stack_folder: Path | None = None
    """Where Python stacks of late ranks are written; None: only in the error."""


class Lanes(Protocol):
    """The ranks of one group. Call numbers rise; number 0 is the start."""

    moved: int
    """Payload bytes that went through the driver so far, both ways."""

    def keep(self, batch: Batch) -> Batch:
        """``batch`` with its wide columns where every rank can fetch them."""
        ...

    def send(self, number: int, call: PreparedCall) -> None:
        """Queues a call on the work lane of its ranks; does not wait for it."""
        ...

    def receive(self, number: int, timeout_s: float) -> dict[int, Reply]:
        """Replies of this call that were not handed out yet; waits until there is one, at most ``timeout_s``."""
        ...

    def deaths(self) -> dict[int, Failure]:
        """Ranks whose process is gone; does not wait."""
        ...

    def place(self, rank: int) -> Place | None:
        """Where a rank runs; None before its process stands. Does not wait."""
        ...

    def control(self, operation: str, ranks: Sequence[int], timeout_s: float, *args: Any) -> dict[int, Any]:
        """Answers of the control lane by rank: ``ping``, ``dump_stacks``, ``pulse``, ``post``; silent: missing."""
        ...

    def end(self, *, polite: bool) -> None:
        """Ends every process. Polite: workers are closed first, on their work lane."""
        ...


class Submission:
    """One call that was sent: who answered, who did not, and until when it is waited for."""

    def __init__(
        self, number: int, role: str, method: str, ranks: Sequence[int], deadline_s: float, previous: Submission | None
    ) -> None:
        self.number = number
        self.role = role
        self.method = method
        self.ranks = tuple(ranks)
        self.deadline_s = deadline_s
        self.previous = previous
        self.replies: dict[int, Reply] = {}
        self.held: Sequence[Arguments | None] = ()
        """Arguments by rank: what they refer to must not be freed before the ranks have read it."""
        self.error: Exception | None = None
        self.settled = False
        self.submitted_at = time.monotonic()
        self.finished_at = 0.0
        self.seconds = 0.0

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in self.ranks if rank not in self.replies]

    @property
    def failures(self) -> list[Failure]:
        """What failed so far."""
        return [reply.failure for reply in self.replies.values() if reply.failure is not None]


class LaneGroup:
    """A ``WorkerGroup`` over lanes; base of ``RayGroup`` and ``LocalGroup``, which make the lanes."""

    def __init__(
        self,
        lanes: Lanes,
        table: CallTable,
        *,
        world: int,
        settings: GroupSettings,
    ) -> None:
        self.name = settings.name
        self._lanes = lanes
        self._table = table
        self._world = world
        self._settings = settings
        self._send_lock = threading.Lock()
        self._wait_lock = threading.RLock()
        self._broken: Exception | None = None
        self._ended = False
        self._unanswered: str | None = None
        self._counted = 0
        self._fetched = Fetched()
        self._pace = Pace()
        self._progress = ""
        self._start = Submission(0, f"group {self.name}", START, range(world), settings.start_timeout_s, None)
        self._last = self._start
        health.enlist(self)

    # -------------------------------------------------------------------------------------------- the worker group

    @property
    def world(self) -> int:
        """Ranks."""
        return self._world

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """See ``WorkerGroup.call``."""
        if self._ended and not isinstance(self._broken, (LostError, DeadlineError)):  # these say more
            raise StateError(f"group {self.name!r} was shut down: {role}.{method} cannot be called")
        if self._broken is not None:
            raise self._because(f"group {self.name!r} cannot go on after: {self._broken}") from self._broken
        prepared = self._table.prepare(role, method, args, kwargs)
        deadline_s = self._settings.deadlines.get(method, self._settings.default_deadline_s)
        with self._send_lock:
            number = self._last.number + 1
            self._last = Submission(number, role, method, prepared.ranks, deadline_s, self._last)
            self._last.held = prepared.shares
            self._lanes.send(number, prepared)
            pending = _Call(self, self._last, replace(prepared, shares=()))
        return Ready(pending.wait()) if prepared.blocking else pending

    def wait_ready(self) -> None:
        """See ``WorkerGroup.wait_ready``."""
        self.settle(self._start)
        if self._start.error is not None:
            raise self._start.error

    def bytes_moved(self) -> int:
        """Payload bytes that went through the driver since the last call of this method."""
        moved, self._counted = self._lanes.moved - self._counted, self._lanes.moved
        return moved

    def stragglers(self) -> dict[str, float]:
        """See ``WorkerGroup.stragglers``."""
        return self._pace.take_ratios()

    def bytes_fetched(self) -> Fetched:
        """See ``WorkerGroup.bytes_fetched``."""
        fetched, self._fetched = self._fetched, Fetched()
        return fetched

    def keep(self, batch: Batch) -> Batch:
        """See ``WorkerGroup.keep``."""
        return self._lanes.keep(batch)

    def post(self, message: Any, *, rank: int = 0) -> None:
        """See ``WorkerGroup.post``."""
        if not self._lanes.control("post", [rank], 10.0, message):
            raise DeadlineError(f"group {self.name!r}: the control lane of {self.who(rank)} did not take a message")

    def ping(self, *, timeout_s: float = 10.0) -> dict[int, float]:
        """See ``WorkerGroup.ping``."""
        return self._lanes.control("ping", range(self._world), timeout_s)

    def dump_stacks(self, *, timeout_s: float = 10.0) -> dict[int, str]:
        """See ``WorkerGroup.dump_stacks``."""
        return self._lanes.control("dump_stacks", range(self._world), timeout_s)

    def shutdown(self) -> None:
        """See ``WorkerGroup.shutdown``. Waits for calls that still run only when all groups are healthy."""
        if self._ended:
            return
        if self._broken is None and (death := self.first_death()) is not None:
            self._broken = LostError(death)  # what still waits is told why, not that somebody has tidied up
        self._ended = True
        health.dismiss(self)
        self._lanes.end(polite=self._broken is None and health.death_elsewhere(self) is None)

    # ---------------------------------------------------------------------------------------------------- waiting

    def who(self, rank: int) -> str:
        """Rank, node and pid as text."""
        place = self._lanes.place(rank)
        where = f"node {place.node}, pid {place.pid}" if place else "no process yet"
        return f"rank {rank} of {self._world} ({where})"

    def first_death(self) -> str | None:
        """What died in this group, as text; None while all live."""
        deaths = {} if self._ended else self._lanes.deaths()
        if not deaths:
            return None
        return self._death_text(next(iter(deaths.values())), "between calls")

    def first_loss(self) -> str | None:
        """The same, or the call that a rank which had started did not answer: the group can do nothing more."""
        death = self.first_death()
        return self._unanswered if death is None and not self._ended and self._start.error is None else death

    def settle(self, submission: Submission) -> None:
        """Waits until a call, and every earlier one, has its answers or its error."""
        with self._wait_lock:
            line = []
            earlier: Submission | None = submission
            while earlier is not None and not earlier.settled:
                line.append(earlier)
                earlier = earlier.previous
            for waiting in reversed(line):
                self._settle_one(waiting)

    def _settle_one(self, call: Submission) -> None:
        begun_at = max(call.submitted_at, call.previous.finished_at if call.previous else 0.0)
        if self._broken is not None:
            call.error = self._because(f"{call.role}.{call.method} was not run, because: {self._broken}")
        elif call.ranks:
            self._await(call, begun_at=begun_at)
        call.settled = True
        call.previous = None
        call.held = ()
        self._fetched = sum((reply.fetched for reply in call.replies.values()), self._fetched)
        call.seconds = max((reply.seconds for reply in call.replies.values()), default=0.0)
        call.finished_at = _finished_at(call, begun_at)
        if call is self._start:
            self._broken = self._broken or call.error
        elif call.error is None and call.replies:
            self._note_pace(call)

    def _note_pace(self, call: Submission) -> None:
        self._progress = f"{call.role}.{call.method}"
        behind = self._pace.took(call.method, {rank: reply.seconds for rank, reply in call.replies.items()})
        if behind is not None:
            rank, seconds, others_s = behind
            log.warning(
                "straggler: %s took %.1f s for %s.%s, the others %.1f s (median); shown once",
                self.who(rank), seconds, call.role, call.method, others_s,
            )  # fmt: skip

    def _await(self, call: Submission, *, begun_at: float) -> None:
        stall_at = begun_at + self._pace.stalls_after_s(call.method, call.deadline_s)
        silence_s = None if call is self._start else self._settings.silence_s  # while built, a rank may be silent
        vigil = Vigil(partial(self._lanes.control, "pulse"), silence_s) if silence_s else None
        while call.missing and not call.failures:
            now = time.monotonic()
            left_s = begun_at + call.deadline_s - now
            call.replies |= self._lanes.receive(call.number, min(max(left_s, 0.0), POLL_S))
            if not call.missing or call.failures:
                break
            hangs = {} if vigil is None else vigil.hangs(call.missing)
            if left_s <= 0 or hangs:
                self._broken = call.error = DeadlineError(self._deadline_text(call, hangs))
                self._unanswered = str(call.error)
                return
            if now >= stall_at:
                stall_at = float("inf")
                self._report_stall(call, now - begun_at)
            elsewhere = health.death_elsewhere(self)
            if elsewhere is not None:
                self._broken = call.error = LostError(f"{call.role}.{call.method} given up, because {elsewhere}")
                return
        if call.failures:
            self._fail(call)

    def _fail(self, call: Submission) -> None:
        failed_at = time.monotonic()
        while call.missing:
            grace_s = PEER_GRACE_S if all(map(_lost_a_peer, call.failures)) else GRACE_S
            if (left_s := failed_at + grace_s - time.monotonic()) <= 0:
                break
            call.replies |= self._lanes.receive(call.number, min(left_s, POLL_S))
        first, *others = sorted(call.failures, key=_precedence)
        call.error = _kind(first, missing=bool(call.missing))(self._failure_text(call, first, others))
        call.error.__cause__ = _original(first)
        if call.missing or any(failure.died for failure in call.failures):
            self._broken = call.error
            if isinstance(call.error, (LostError, DeadlineError)):  # and nothing that its code has raised
                self._unanswered = str(call.error)

    def _because(self, text: str) -> Exception:
        """An error that follows from the one that broke the group, of its kind."""
        kinds = (LostError, DeadlineError)
        return next((kind(text) for kind in kinds if isinstance(self._broken, kind)), WorkerError(text))

    # ----------------------------------------------------------------------------------------------------- text

    def _failure_text(self, call: Submission, first: Failure, others: Sequence[Failure]) -> str:
        if first.died:
            text = self._death_text(first, f"during {call.role}.{call.method}")
        else:
            role = first.role or call.role
            text = f"role {role!r}, {self.who(first.rank)}: {call.method} raised {first.kind}: {first.message}"
        if others:
            listing = ", ".join(f"rank {failure.rank} ({failure.kind})" for failure in others)
            text += f"\nfailed as well, by the same call or because of it: {listing}"
        if call.missing:
            text += f"\ndid not answer: {', '.join(self.who(rank) for rank in call.missing)}"
            text += self._everyones_stacks()[1]
        title = "last lines of its log" if first.died else "its traceback"
        return f"{text}\n--- rank {first.rank}, {title} ---\n{first.trace.rstrip()}" if first.trace else text

    def _death_text(self, failure: Failure, when: str) -> str:
        roles = ", ".join(self._table.roles)
        return f"{self.who(failure.rank)} of group {self.name!r} (roles: {roles}) died {when}: {failure.message}"

    def _deadline_text(self, call: Submission, hangs: Mapping[int, str]) -> str:
        late = [self.who(rank) for rank in call.missing]
        here = [str(rank) for rank in call.ranks if rank in call.replies]
        faults = "; ".join(f"{self.who(rank)}: {fault}" for rank, fault in hangs.items())
        passed = f"hangs: {faults} (silence_s)" if hangs else f"passed its deadline of {call.deadline_s:g} s"
        text = f"role {call.role!r}: {call.method} {passed}; no answer from "
        text += f"{', '.join(late)}; answered: {'rank ' + ', '.join(here) if here else 'none'}"
        if call is self._start:
            text += ". A rank without a process lacks a resource; one with a process is still building its workers"
        stacks, kept = self._everyones_stacks()
        for rank in call.missing:
            if rank in stacks:
                text += f"\n--- rank {rank} stands at ---\n{stacks[rank].rstrip()}"
            else:
                text += f"\n--- rank {rank} answers neither its control lane nor a signal ---"
        return text + kept

    def keep_stacks(self) -> dict[int, str]:
        """Stacks of all ranks that answer, also written to the stack folder where there is one."""
        stacks = self._lanes.control("dump_stacks", range(self._world), STACKS_TIMEOUT_S)
        for rank in set(range(self._world)) - set(stacks):
            place = self._lanes.place(rank)
            if place is not None and place.node == node_name() and (stack := health.stacks_by_signal(place.pid)):
                stacks[rank] = stack
        for rank, stack in stacks.items():
            self._leave_stacks(f"stacks_{self.name}_rank{rank}.txt", stack)
        return stacks

    def _leave_stacks(self, name: str, stacks: str) -> None:
        folder = self._settings.stack_folder
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(stacks)
        except OSError as error:  # what they are to explain must be said all the same
            log.warning("stacks cannot be written to %s: %s", folder, error)

    def _everyones_stacks(self) -> tuple[dict[int, str], str]:
        """Stacks of this group's ranks; those of the other groups and of the driver are written beside them."""
        stacks = self.keep_stacks()
        if self._settings.stack_folder is None:
            return stacks, ""
        for other in health.others(self):
            other.keep_stacks()
        self._leave_stacks("stacks_driver.txt", dump_stacks())
        return stacks, f"\nstacks of every worker and of the driver: {self._settings.stack_folder}"

    def _report_stall(self, call: Submission, seconds: float) -> None:
        usual = self._pace.usual_s(call.method)
        known = "" if usual is None else f", usually {usual:.1f} s"
        answered = [str(rank) for rank in call.ranks if rank in call.replies]
        places = {rank: stands_at(s) for rank, s in self._lanes.control("dump_stacks", call.missing, STACKS_S).items()}
        silent = [rank for rank in call.missing if rank not in places]
        working = [rank for rank, (_, waits) in places.items() if not waits]
        suspects = silent or (working if len(working) < len(call.missing) or answered else [])
        lines = [
            f"{call.role}.{call.method} runs for {seconds:.0f} s{known} (deadline {call.deadline_s:g} s)",
            f"  last progress: {self._progress or 'the start'}; answered: {', '.join(answered) or 'no rank'}",
            f"  suspected: {', '.join(self.who(rank) for rank in suspects) or 'no single rank'}",
        ]
        for rank in call.missing:
            where, waits = places.get(rank, ("no answer on its control lane: stopped, or no processor time", False))
            lines.append(f"  {self.who(rank)}{' waits for its peers' if waits else ''}: {where}")
        log.warning("\n".join(lines))


class _Call(Pending[Any]):
    """The pending result of one call on a ``LaneGroup``; may be waited for more than once."""

    def __init__(self, group: LaneGroup, submission: Submission, prepared: PreparedCall) -> None:
        self._group = group
        self._submission = submission
        self._prepared: PreparedCall | None = prepared
        self._result: Any = None

    def wait(self) -> Any:
        """See ``Pending.wait``. Consumes the replies; unblocked by the last rank, a failure or the deadline."""
        self._group.settle(self._submission)
        if self._submission.error is not None:
            raise self._submission.error
        if self._prepared is not None:
            values = {rank: reply.value for rank, reply in self._submission.replies.items()}
            self._result = self._prepared.collect(values)
            self._prepared = None
            self._submission.replies = {}
        return self._result

    @property
    def seconds(self) -> float:
        """See ``Pending.seconds``."""
        return self._submission.seconds


def _finished_at(call: Submission, begun_at: float) -> float:
    """When the last rank was done, on this process's own clock: perhaps long before the driver asks.

    What ranks tell is wall-clock time, which jumps and differs by node: it is believed only within what must be true.
    """
    now = time.monotonic()
    if not call.replies:
        return now
    ago_s = time.time() - max(reply.at for reply in call.replies.values())
    return min(now, max(begun_at + call.seconds, now - max(0.0, ago_s)))


def _kind(first: Failure, *, missing: bool) -> type[WorkerError | DeadlineError]:
    """The class of a call's error: something is gone, a rank did not come in time, or a worker raised."""
    if first.died or _lost_a_peer(first):
        return LostError
    return DeadlineError if missing and _has_sign(first, TIMEOUT_SIGNS) else WorkerError


def _precedence(failure: Failure) -> tuple[bool, bool, float]:
    return not failure.died, _lost_a_peer(failure), failure.at


def _lost_a_peer(failure: Failure) -> bool:
    """Whether a rank failed because another one went away, or the rows that it kept."""
    if failure.kind == LostError.__name__:
        return True
    return not failure.died and _has_sign(failure, PEER_SIGNS)


def _has_sign(failure: Failure, signs: Sequence[str]) -> bool:
    text = f"{failure.kind} {failure.message}".lower()
    return any(sign in text for sign in signs)


def _original(failure: Failure) -> BaseException | None:
    if not failure.original:
        return None
    try:
        return pickle.loads(failure.original)
    except Exception:  # noqa: BLE001 - an exception class that cannot be rebuilt here: its text is in the message
        return None
