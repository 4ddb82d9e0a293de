"""One rank of a group: its torch.distributed world, its workers, and the two lanes; shared by every kind of group.

All of ``Host`` but the control methods runs in one thread, the work lane: torch keeps grad mode, default device and
autocast per thread, and vLLM and FSDP keep what they saw in the thread that built them.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import psutil
import torch
import torch.distributed as dist

from hybridflow.batch.batch import Batch
from hybridflow.batch.refs import Reader, Store
from hybridflow.dispatch.group import Fetched, Mailbox, Pulse, RankContext, WorkerSpec
from hybridflow.dispatch.transfer import Arguments
from hybridflow.single_controller.gloo import use_one_thread
from hybridflow.single_controller.oom import OomKills
from hybridflow.single_controller.wire import pack, unpack
from hybridflow.utils.errors import MachineError, StateError
from hybridflow.utils.optional import load

START = "start"
"""Name under which building the workers appears in errors and deadlines."""


@runtime_checkable
class Closeable(Protocol):
    """A worker that holds something that must be closed before its process ends."""

    def close(self) -> None:
        """Ends what the worker holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong on one rank, as plain values."""

    rank: int
    kind: str
    """Class name of the exception, or ``died``."""
    message: str
    trace: str = ""
    """The worker's traceback, or the last lines of its log."""
    role: str = ""
    """Role that was being built; empty outside the start."""
    at: float = 0.0
    """Wall-clock seconds, to find the first of several."""
    original: bytes = b""
    """The exception itself, pickled, when that is possible."""

    @property
    def died(self) -> bool:
        """Whether the process is gone."""
        return self.kind == "died"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of one rank to one call."""

    value: Any = None
    failure: Failure | None = None
    at: float = field(default_factory=time.time)
    """Wall-clock seconds when the rank was done."""
    seconds: float = 0.0
    """How long the method ran there, fetching included."""
    fetched: Fetched = field(default_factory=Fetched)
    """What it read of other ranks' objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs."""

    node: str
    pid: int
    log: str = ""
    """Path of its error log on its own node; empty: none."""
    oom_kills: OomKills | None = None
    """What the kernel had counted there when it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a group meet."""

    address: str
    port: int

    def __str__(self) -> str:
        """``host:port``, with brackets around an IPv6 address."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def open_store(address: str, ports: Sequence[int], timeout_s: float) -> tuple[dist.TCPStore, Rendezvous]:
    """A store that serves on the first port of ``ports`` that can be bound (0: any free one), and where it serves.

    Raises:
        MachineError: when none of them can be bound.
    """
    refused = []
    for port in ports:
        try:
            listener = _listen(address, port)
        except OSError as error:
            refused.append(f"{Rendezvous(address=address, port=port)} ({error.strerror})")
            continue
        meeting = Rendezvous(address=address, port=listener.getsockname()[1])
        store = dist.TCPStore(
            address,
            meeting.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),  # the store owns it now
        )
        return store, meeting
    raise MachineError(f"no port can be bound on {socket.gethostname()}: {'; '.join(refused)}")


def _listen(address: str, port: int) -> socket.socket:
    """A listening socket on this address alone (TCPStore itself would listen on every interface)."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(where)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def join_store(meeting: Rendezvous, timeout_s: float) -> dist.TCPStore:
    """A client of the store that another process serves."""
    return dist.TCPStore(meeting.address, meeting.port, is_master=False, timeout=timedelta(seconds=timeout_s))


def open_world(
    store: dist.TCPStore, meeting: Rendezvous, *, rank: int, world: int, backend: str, timeout_s: float
) -> None:
    """Initialises torch.distributed; every rank of the group calls it once. A process of one rank may call it again.

    ``timeout_s`` is the deadline of collectives in this world and in every group that is made of it later.

    Raises:
        StateError: when this process already belongs to a world of another size.
    """
    os.environ |= {"MASTER_ADDR": meeting.address, "MASTER_PORT": str(meeting.port)}
    if dist.is_initialized():
        if dist.get_world_size() != world or world != 1:
            raise StateError(f"this process is already in a torch.distributed world of {dist.get_world_size()} ranks")
        return
    timeout = timedelta(seconds=timeout_s)
    use_one_thread()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    if world > 1:
        # Meshes, pipelines and vLLM make groups of their own and name no timeout: torch (2.13) then takes these two
        # numbers, half an hour and ten minutes, and not what the world was given.
        dist.distributed_c10d.default_pg_timeout = dist.distributed_c10d.default_pg_nccl_timeout = timeout


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has ``address``; None: none has it."""
    found = (name for name, held in psutil.net_if_addrs().items() if address in {entry.address for entry in held})
    return next(found, None)


def apply_environment(environment: Mapping[str, str], unset: Sequence[str]) -> None:
    """Sets and removes variables of this process."""
    for name in unset:
        os.environ.pop(name, None)
    os.environ |= environment


class Host:
    """The workers of one rank.

    Args:
        context: handed to every worker, with the siblings built so far.
        specs: roles in the order in which they are built.
        store: makes, from this rank's name, what keeps the wide columns of its results; None: they are returned as
            they are.
    """

    def __init__(
        self, context: RankContext, specs: Sequence[WorkerSpec], store: Callable[[str], Store] | None = None
    ) -> None:
        self.context = replace(context, node=context.node or node_name())
        self._specs = tuple(specs)
        roles = ", ".join(spec.role for spec in specs)
        name = f"rank {context.rank} of {context.world} (roles {roles}; node {self.context.node}, pid {os.getpid()})"
        self._store = None if store is None else store(name)
        self._building = ""

    @property
    def workers(self) -> dict[str, Any]:
        """Workers by role."""
        return self.context.siblings

    def build(self) -> None:
        """Constructs the workers; torch.distributed's world must be open."""
        if self.context.device.startswith("cuda"):
            torch.cuda.set_device(self.context.device)
        for spec in self._specs:
            self._building = spec.role
            self.workers[spec.role] = load(spec.target)(self.context, **spec.kwargs)
        self._building = ""

    def start(self, open_ranks: Callable[[], None]) -> Reply:
        """An empty reply once the world is open and the workers stand, or the failure. Never raises."""
        try:
            open_ranks()
            self.build()
            return Reply()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the process boundary: the driver raises it with role, rank and method
            return Reply(failure=replace(failure_of(error, self.context.rank), role=self._building))

    def execute(self, role: str, method: str, arguments: Arguments, *, wanted: bool = True) -> Reply:
        """The method's result, if it is ``wanted``: batches in it are on the CPU, their wide columns in the store.

        Rows that other ranks keep are fetched before the method runs.
        """
        started, reader = time.perf_counter(), Reader()
        arguments = arguments.map_batches(lambda batch: batch.fetched(reader))
        with self.context.recorder.around(role, method):
            result = getattr(self.workers[role], method)(*arguments.args, **arguments.kwargs)
        value = self._leave(result) if wanted else None
        seconds = time.perf_counter() - started
        return Reply(value, seconds=seconds, fetched=Fetched(reader.read_bytes, reader.over_fetched_bytes))

    def _leave(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self._leave(part) for part in result)
        if not isinstance(result, Batch):
            return result
        if self.context.device != "cpu":
            result = result.to("cpu")
        return result if self._store is None else result.kept(self._store)

    def answer(self, role: str, method: str, payload: bytes, *, wanted: bool, beside: list[Any] | None = None) -> bytes:
        """A packed ``Reply``: the result if it is ``wanted``, or the failure. Never raises.

        ``beside`` holds the tokens of the arguments' references, and afterwards those of the reply's; None: they are in
        the payload.
        """
        tokens: list[Any] | None = None if beside is None else []
        try:
            arguments = unpack(payload, None if self._store is None else self._store.open, beside)
            packed = pack(self.execute(role, method, arguments, wanted=wanted), tokens)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the process boundary: the driver raises it with role, rank and method
            tokens, packed = [], pack(Reply(failure=failure_of(error, self.context.rank)))
        if beside is not None:
            beside[:] = tokens or ()
        return packed

    def close(self) -> None:
        """Closes the workers, last built first; every one is tried. Raises the first error."""
        errors: list[Exception] = []
        for role in reversed(list(self.workers)):
            worker = self.workers.pop(role)
            if isinstance(worker, Closeable):
                try:
                    worker.close()
                except Exception as error:  # noqa: BLE001 - re-raised below, after the others had their turn
                    errors.append(error)
        if errors:
            raise errors[0]


def failure_of(error: BaseException, rank: int) -> Failure:
    """``error`` as plain values."""
    failure = Failure(
        rank=rank,
        kind=type(error).__name__,
        message=str(error),
        trace="".join(traceback.format_exception(error)),
        at=time.time(),
    )
    try:
        return replace(failure, original=pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError):
        return failure


def dump_stacks() -> str:
    """Python stacks of all threads of this process, innermost call first."""
    with tempfile.TemporaryFile(mode="w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read()


def control_answer(mailbox: Mailbox, pulse: Pulse, operation: str, args: Sequence[Any]) -> Any:
    """What the control lane answers.

    ``post`` leaves a message, ``ping`` says that it lives, ``dump_stacks`` shows where it stands, ``pulse`` how far it
    has come.
    """
    if operation == "post":
        mailbox.put(*args)
        return True
    if operation == "pulse":
        return pulse.beats
    return dump_stacks() if operation == "dump_stacks" else True


def node_name() -> str:
    """Host name of this machine."""
    return socket.gethostname()
