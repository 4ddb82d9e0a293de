"""A worker group without Ray: this process for one rank, forked processes above.

The same workers, calls and errors as ``RayGroup``; a laptop debugger or a test needs no cluster.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.refs import Bytes, Kept, may_stay
from hybridflow.dispatch.group import RankContext, WorkerSpec
from hybridflow.dispatch.transfer import Arguments
from hybridflow.single_controller import health
from hybridflow.single_controller.calls import CallTable, PreparedCall
from hybridflow.single_controller.host import (
    Failure,
    Host,
    Place,
    Reply,
    control_answer,
    failure_of,
    node_name,
    open_store,
    open_world,
)
from hybridflow.single_controller.lanes import GroupSettings, LaneGroup, Lanes
from hybridflow.single_controller.local_process import Plan, serve_rank, untagged
from hybridflow.single_controller.oom import oom_kills
from hybridflow.single_controller.segments import (
    Segment,
    SegmentStore,
    SegmentTable,
    remove_segments_of,
    remove_segments_of_the_dead,
)
from hybridflow.single_controller.wire import pack, unpack

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PRELOAD = ("hybridflow.single_controller.local_process",)
"""Modules that the fork server imports once, so that a rank starts in a fraction of a second."""
CLOSE_TIMEOUT_S = 20.0
"""How long shutdown waits for workers to close before their processes are killed."""


class LocalGroup(LaneGroup):
    """A group of ``n`` ranks on this machine.

    With one rank (not ``apart``) the workers live in the calling process and thread: a call has run when it returns,
    deadlines cannot interrupt it, and ``environment`` must already hold (a difference is logged). Above, each rank is a
    process of a fork server: the calling script needs the ``if __name__ == "__main__"`` guard, as all of
    multiprocessing does.

    Args:
        n: ranks.
        specs: roles, built in this order on every rank.
        settings: name, device and deadlines; on ``cuda`` rank r uses ``cuda:r``.
        preload: modules for the process-wide fork server, without effect once it runs; empty leaves its list alone.
        apart: whether a single rank is a process, too.

    Raises:
        ConfigError: see ``CallTable``.
        MachineError: no port could be bound.
    """

    def __init__(
        self,
        n: int,
        specs: Sequence[WorkerSpec],
        settings: GroupSettings | None = None,
        *,
        preload: Sequence[str] = PRELOAD,
        apart: bool = False,
    ) -> None:
        settings = settings or GroupSettings(name="local")
        table = CallTable(specs, n)
        threads = max(1, (os.cpu_count() or 1) // n)
        plans = [
            Plan(
                context=_context(rank, n, settings.device, threads),
                specs=tuple(specs),
                environment={"OMP_NUM_THREADS": str(threads), **settings.environment},
                unset=tuple(settings.unset),
                path=tuple(sys.path),
                backend=settings.backend,
                collective_timeout_s=settings.collective_timeout_s,
                driver=os.getpid(),
            )
            for rank in range(n)
        ]
        ports = settings.ports
        within = n == 1 and not apart
        lanes: Lanes = _InProcess(plans[0], settings.environment, ports) if within else _Forked(plans, ports, preload)
        super().__init__(lanes, table, world=n, settings=settings)


def _context(rank: int, world: int, device: str, threads: int) -> RankContext:
    return RankContext(
        rank=rank,
        world=world,
        local_rank=rank,
        node=node_name(),
        device=device if device == "cpu" else f"{device}:{rank}",
        threads=threads,
    )


class _InProcess:
    """One rank in the calling thread. Its world is made once per process and kept: engines hold groups of it."""

    def __init__(self, plan: Plan, environment: Mapping[str, str], ports: Sequence[int]) -> None:
        self.moved = 0
        differing = [name for name, value in environment.items() if os.environ.get(name) != value]
        differing += [name for name in plan.unset if name in os.environ]
        if differing:
            log.warning("this process was started without the environment it needs: %s", ", ".join(differing))
        self._host = Host(plan.context, plan.specs)
        self._replies: dict[int, Reply] = {}

        def open_ranks() -> None:
            store, meeting = open_store(LOOPBACK, ports, plan.collective_timeout_s)
            open_world(store, meeting, rank=0, world=1, backend=plan.backend, timeout_s=plan.collective_timeout_s)

        self._replies[0] = self._host.start(open_ranks)

    def send(self, number: int, call: PreparedCall) -> None:
        share = call.shares[0]
        assert share is not None, "a group of one rank calls rank 0"
        try:
            reply = self._host.execute(call.role, call.method, share)
            value = reply.value
            self.moved += _payload(share) + _payload(Arguments(value if isinstance(value, tuple) else (value,)))
            self._replies[number] = reply
        except Exception as error:  # noqa: BLE001 - the boundary of the worker: raised by wait() with role, rank and method
            self._replies[number] = Reply(failure=failure_of(error, 0))

    def keep(self, batch: Batch) -> Batch:
        return batch  # it is where the rank is

    def receive(self, number: int, timeout_s: float) -> dict[int, Reply]:
        return {0: self._replies.pop(number)}

    def deaths(self) -> dict[int, Failure]:
        return {}

    def control(self, operation: str, ranks: Sequence[int], timeout_s: float, *args: Any) -> dict[int, Any]:
        answer = control_answer(self._host.context.mailbox, self._host.context.pulse, operation, args)
        return {0: 0.0 if operation == "ping" else answer}

    def place(self, rank: int) -> Place | None:
        return Place(node=node_name(), pid=os.getpid())

    def end(self, *, polite: bool) -> None:
        self._host.close()


def _payload(arguments: Arguments) -> int:
    """Bytes that would move if the rank were another process: those of columns that are not wide."""
    columns = [value for batch in arguments.batches().values() for value in batch.columns().values()]
    return sum(value.nbytes for value in columns if isinstance(value, Tensor) and not may_stay(value))


class _Writer:
    """Writes calls to one rank, in a thread of its own.

    A process that is stopped reads nothing: its full pipe must not keep the driver from seeing the deadline of a call.
    """

    def __init__(self, rank: int, pipe: connection.Connection) -> None:
        self._rank = rank
        self._pipe = pipe
        self._calls: SimpleQueue[Sequence[bytes] | None] = SimpleQueue()
        threading.Thread(target=self._write, name=f"hybridflow-calls-{rank}", daemon=True).start()

    def put(self, *messages: bytes) -> None:
        """Queues messages that stay together."""
        self._calls.put(messages)

    def end(self) -> None:
        """Ends the thread behind what is queued."""
        self._calls.put(None)

    def _write(self) -> None:
        try:
            while (messages := self._calls.get()) is not None:
                for message in messages:
                    self._pipe.send_bytes(message)
        except ConnectionError:  # the rank is gone: the thread that reads from it says so
            return
        except OSError as error:
            log.error("rank %d cannot be written to, and will pass its deadline: %s", self._rank, error)


class _Forked:
    """Ranks as processes of a fork server; two pipes each, and one thread here that reads them all."""

    def __init__(self, plans: Sequence[Plan], ports: Sequence[int], preload: Sequence[str]) -> None:
        self.moved = 0
        self._arrived = threading.Condition()
        self._replies: dict[int, dict[int, Reply]] = defaultdict(dict)
        self._answers: dict[int, dict[int, Any]] = {}
        self._deaths: dict[int, Failure] = {}
        self._running: dict[int, list[int]] = {rank: [0] for rank in range(len(plans))}
        self._asked = 0
        self._ending = False
        self._oom_kills = oom_kills()
        remove_segments_of_the_dead()
        self._table = SegmentTable()
        self._own = SegmentStore("the driver")
        self._send_lock = threading.Lock()
        self._store, self._meeting = open_store(LOOPBACK, ports, plans[0].collective_timeout_s)
        self._start(plans, preload)
        atexit.register(self._kill)  # before multiprocessing's own hook, which would wait for them
        threading.Thread(target=self._read, name="hybridflow-replies", daemon=True).start()

    def _start(self, plans: Sequence[Plan], preload: Sequence[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        if preload:
            context.set_forkserver_preload(list(preload))
        self._work: list[connection.Connection] = []
        self._writers: list[_Writer] = []
        self._control: list[connection.Connection] = []
        self._processes: list[BaseProcess] = []
        for rank, plan in enumerate(plans):
            work, their_work = context.Pipe()
            control, their_control = context.Pipe()
            process = context.Process(
                target=serve_rank,
                args=(their_work, their_control, pack(plan), self._meeting),
                name=f"hybridflow-rank{rank}",
                daemon=False,
            )
            process.start()
            their_work.close()
            their_control.close()
            self._work.append(work)
            self._writers.append(_Writer(rank, work))
            self._control.append(control)
            self._processes.append(process)

    def send(self, number: int, call: PreparedCall) -> None:
        packed: dict[int, bytes] = {}
        for rank, share in enumerate(call.shares):
            if share is None:
                continue
            if id(share) not in packed:
                packed[id(share)] = pack(share.map_batches(lambda batch: batch.readable(Segment)))
            payload = packed[id(share)]
            with self._arrived:
                if (death := self._deaths.get(rank)) is not None:
                    self._replies[number][rank] = Reply(failure=death)
                    continue
                self._running[rank].append(number)
            self._writers[rank].put(pack((number, call.role, call.method, rank in call.wanted)), payload)
            self.moved += len(payload)

    def keep(self, batch: Batch) -> Batch:
        return batch.kept(self)

    def put(self, data: Bytes) -> Kept:
        """Keeps what the driver made (``Store.put``)."""
        kept = self._own.put(data)
        self.moved += kept.size
        return self.open(kept.token, kept.size, kept.owner)

    def open(self, token: str, size: int, owner: str) -> Kept:
        """The driver's reference to an object of any process (``Store.open``)."""
        return self._table.hold(token, size, owner, self._count)

    def _count(self, kept: Kept) -> None:
        self.moved += kept.size

    def receive(self, number: int, timeout_s: float) -> dict[int, Reply]:
        with self._arrived:
            self._arrived.wait_for(lambda: number in self._replies, timeout_s)
            return self._replies.pop(number, {})

    def deaths(self) -> dict[int, Failure]:
        return dict(self._deaths)

    def control(self, operation: str, ranks: Sequence[int], timeout_s: float, *args: Any) -> dict[int, Any]:
        with self._arrived:
            self._asked += 1
            question, asked_at = self._asked, time.monotonic()
            self._answers[question] = {}
        reached = 0
        for rank in ranks:
            try:
                with self._send_lock:
                    self._control[rank].send_bytes(pack((question, operation, args)))
                reached += 1
            except OSError:  # a rank that is gone does not answer
                continue
        with self._arrived:
            self._arrived.wait_for(lambda: len(self._answers[question]) >= reached, timeout_s)
            answers = self._answers.pop(question)
        if operation == "ping":
            return {rank: at - asked_at for rank, (_, at) in answers.items()}
        return {rank: answer for rank, (answer, _) in answers.items()}

    def place(self, rank: int) -> Place | None:
        pid = self._processes[rank].pid
        return None if pid is None else Place(node=node_name(), pid=pid)

    def end(self, *, polite: bool) -> None:
        self._ending = True
        pids = [process.pid for process in self._processes if process.pid is not None]
        children = health.descendants(pids)
        if polite:
            for writer in self._writers:
                writer.put(pack(None))
            until = time.monotonic() + CLOSE_TIMEOUT_S
            for process in self._processes:
                process.join(max(0.0, until - time.monotonic()))
        for writer in self._writers:
            writer.end()
        health.kill(children, timeout_s=0.0)
        self._kill()
        atexit.unregister(self._kill)
        health.wait_gone(children, timeout_s=5.0)
        health.remove_segments([*pids, *children], [self._meeting.port])
        for pipe in (*self._work, *self._control):
            pipe.close()
        del self._store

    def _kill(self) -> None:
        self._ending = True
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(5.0)
        remove_segments_of([process.pid for process in self._processes if process.pid is not None])

    # ---------------------------------------------------------------------------------------- the reading thread

    def _read(self) -> None:
        """Hands out replies until every rank is gone; consumes both pipes of every rank."""
        open_pipes = {pipe: (rank, True) for rank, pipe in enumerate(self._work)}
        open_pipes |= {pipe: (rank, False) for rank, pipe in enumerate(self._control)}
        while open_pipes:
            try:
                ready = connection.wait(list(open_pipes), timeout=1.0)
            except OSError:  # closed by end()
                return
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank, is_work = open_pipes[pipe]
                try:
                    data = pipe.recv_bytes()
                except (EOFError, OSError):
                    del open_pipes[pipe]
                    if is_work:
                        self._mourn(rank)
                    continue
                self._take(rank, data, is_work=is_work)

    def _take(self, rank: int, data: bytes, *, is_work: bool) -> None:
        number, packed = untagged(data)
        try:
            value = unpack(packed, self.open)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits; this thread must outlive what it cannot read
            value = Reply(failure=failure_of(error, rank))
        with self._arrived:
            if is_work:
                self.moved += len(data)
                self._running[rank].remove(number)
                self._replies[number][rank] = value
            elif number in self._answers:
                self._answers[number][rank] = (value, time.monotonic())
            self._arrived.notify_all()

    def _mourn(self, rank: int) -> None:
        """Every call that still runs or waits on a rank whose process is gone fails."""
        process = self._processes[rank]
        if not self._ending:
            process.join(1.0)
        remove_segments_of([] if process.pid is None else [process.pid])  # its rows die with it
        with self._arrived:
            failure = self._deaths.get(rank) or Failure(
                rank=rank,
                kind="died",
                message=health.exit_cause(process.exitcode, self._oom_kills, oom_kills()),
                at=time.time(),
            )
            if not self._ending:
                self._deaths[rank] = failure
            for number in self._running[rank]:
                self._replies[number][rank] = Reply(failure=failure)
            self._running[rank] = []
            self._arrived.notify_all()
