"""The child side of ``LocalGroup``: one rank in a process of the fork server.

The main thread is the work lane. Two more threads read the pipes, so that the driver never waits for a busy rank: one
queues calls, the other answers the control lane. When the driver is gone the pipes close and the process ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from hybridflow.dispatch.group import RankContext, WorkerSpec
from hybridflow.single_controller import health
from hybridflow.single_controller.host import (
    Host,
    Rendezvous,
    apply_environment,
    control_answer,
    join_store,
    open_world,
)
from hybridflow.single_controller.segments import SegmentStore, remove_segments_of, remove_segments_of_the_dead
from hybridflow.single_controller.wire import pack, unpack

Call = tuple[int, str, str, bool, bytes]
"""(number, role, method, whether the result travels, packed arguments)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a rank needs to start."""

    context: RankContext
    specs: Sequence[WorkerSpec]
    environment: Mapping[str, str]
    unset: Sequence[str]
    path: Sequence[str]
    """``sys.path`` of the driver, so that its modules import here."""
    backend: str
    collective_timeout_s: float
    driver: int
    """Its pid."""


def serve_rank(work: Connection, control: Connection, packed: bytes, meeting: Rendezvous) -> None:
    """Runs one rank until the driver says stop or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to decide
    health.answer_stack_signal()
    plan: Plan = unpack(packed)
    apply_environment(plan.environment, plan.unset)
    sys.path[:] = plan.path
    torch.set_num_threads(int(plan.environment["OMP_NUM_THREADS"]))
    context = plan.context
    host = Host(context, plan.specs, SegmentStore)
    threading.Thread(target=_answer_control, args=(control, context), name="control-lane", daemon=True).start()
    calls: SimpleQueue[Call | None] = SimpleQueue()
    threading.Thread(target=_queue_calls, args=(work, calls, plan.driver), name="work-queue", daemon=True).start()

    def open_ranks() -> None:
        store = join_store(meeting, plan.collective_timeout_s)
        open_world(
            store,
            meeting,
            rank=context.rank,
            world=context.world,
            backend=plan.backend,
            timeout_s=plan.collective_timeout_s,
        )

    reply = host.start(open_ranks)
    work.send_bytes(tagged(0, pack(reply)))
    while (call := calls.get()) is not None:
        number, role, method, wanted, arguments = call
        work.send_bytes(tagged(number, host.answer(role, method, arguments, wanted=wanted)))
    _leave(host)


def tagged(number: int, data: bytes) -> bytes:
    """``data`` behind the number of the call or question that it answers."""
    return number.to_bytes(8, "little") + data


def untagged(data: bytes) -> tuple[int, memoryview]:
    """What ``tagged`` was given."""
    return int.from_bytes(data[:8], "little"), memoryview(data)[8:]


def _leave(host: Host) -> None:
    try:
        host.close()
    except Exception:  # noqa: BLE001 - the process boundary, and the last thing it does: shown, not raised
        print(f"rank {host.context.rank}: closing a worker failed\n{traceback.format_exc()}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # exit handlers of engines and of torch.distributed may wait for peers that are gone


def _queue_calls(work: Connection, calls: SimpleQueue[Call | None], driver: int) -> None:
    try:
        while (head := unpack(work.recv_bytes())) is not None:
            number, role, method, wanted = head
            calls.put((number, role, method, wanted, work.recv_bytes()))
    except (EOFError, OSError):
        remove_segments_of([os.getpid(), driver])
        remove_segments_of_the_dead()  # a peer may have died with it
        os._exit(1)  # the driver is gone; whatever runs here has nobody left to report to
    calls.put(None)


def _answer_control(control: Connection, context: RankContext) -> None:
    try:
        while True:
            question, operation, args = unpack(control.recv_bytes())
            control.send_bytes(tagged(question, pack(_answered(context, operation, args))))
    except (EOFError, OSError):  # the driver is gone; ``_queue_calls`` ends the process
        return


def _answered(context: RankContext, operation: str, args: Sequence[Any]) -> Any:
    try:
        return control_answer(context.mailbox, context.pulse, operation, args)
    except OSError as error:  # stacks go through a file: a full disk must not end the lane
        return f"no {operation}: {error}"
