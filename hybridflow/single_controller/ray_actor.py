"""One rank as a Ray actor. Imports nothing that reads the environment: torch comes with ``Host``, after it is set."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray

from hybridflow.dispatch.group import Mailbox, Pulse
from hybridflow.single_controller.oom import OomKills, oom_kills
from hybridflow.utils.optional import load

T = TypeVar("T")
CONTROL = "control"
"""Name of the concurrency group that answers while a call runs."""
_HOST = "hybridflow.single_controller.host"
_WIRE = "hybridflow.single_controller.wire"
_STORE = "hybridflow.single_controller.ray_store:RayStore"


class RankActor:
    """The Ray face of a ``Host``.

    The default concurrency group takes one call at a time, in submission order; each is carried out by one thread of
    our own, since Ray does not promise to use the same one.
    """

    def __init__(self, unset: Sequence[str], path: Sequence[str]) -> None:
        for name in unset:
            os.environ.pop(name, None)
        sys.path += [entry for entry in path if entry not in sys.path]
        self._lane = ThreadPoolExecutor(max_workers=1, thread_name_prefix="work-lane")
        self._mailbox = Mailbox()
        self._pulse = Pulse()
        self._ended = threading.Event()

    def _work(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self._lane.submit(function, *args, **kwargs).result()

    # ------------------------------------------------------------------------------------------------- work lane

    def serve(self, ports: Sequence[int], timeout_s: float) -> Any:
        """Rank 0 only: opens the store; where the ranks meet."""
        address = ray.util.get_node_ip_address()
        self._store, meeting = self._work(load(f"{_HOST}:open_store"), address, ports, timeout_s)
        return meeting

    def start(self, packed: bytes, meeting: Any, backend: str, timeout_s: float) -> tuple[bytes, list[Any]]:
        """Opens the world and builds the workers; a packed ``Reply``, as ``work`` gives it."""
        return self._work(self._start, packed, meeting, backend, timeout_s), []

    def _start(self, packed: bytes, meeting: Any, backend: str, timeout_s: float) -> bytes:
        load("hybridflow.single_controller.health:answer_stack_signal")()
        context, specs = load(f"{_WIRE}:unpack")(packed)
        context.mailbox, context.pulse = self._mailbox, self._pulse
        self._host = load(f"{_HOST}:Host")(context, specs, load(_STORE))
        load("torch:set_num_threads")(int(os.environ["OMP_NUM_THREADS"]))
        # Left alone, gloo takes the interface of the host's name, on many machines a loopback address.
        interface = load(f"{_HOST}:interface_of")(ray.util.get_node_ip_address())
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

        def open_ranks() -> None:
            store = self._store if context.rank == 0 else load(f"{_HOST}:join_store")(meeting, timeout_s)
            load(f"{_HOST}:open_world")(
                store, meeting, rank=context.rank, world=context.world, backend=backend, timeout_s=timeout_s
            )

        return load(f"{_WIRE}:pack")(self._host.start(open_ranks))

    def work(
        self, role: str, method: str, wanted: bool, payload: bytes, references: list[Any]
    ) -> tuple[bytes, list[Any]]:
        """Carries out one call; a packed ``Reply`` and the Ray references that belong to it, so that Ray sees them."""
        packed = self._work(self._host.answer, role, method, payload, wanted=wanted, beside=references)
        return packed, references

    def close(self) -> None:
        """Closes the workers."""
        self._work(self._host.close)

    # ---------------------------------------------------------------------------------------------- control lane

    @ray.method(concurrency_group=CONTROL)
    def place(self) -> tuple[str, str, int, str, OomKills]:
        """Host, Ray's id of the node, pid and path of the error log of this process; and the kernel's counters."""
        log = Path("/proc/self/fd/2").resolve()
        node_id = ray.get_runtime_context().get_node_id()
        return socket.gethostname(), node_id, os.getpid(), str(log) if log.is_file() else "", oom_kills()

    @ray.method(concurrency_group=CONTROL)
    def stay(self) -> None:
        """Never returns: its reference fails when the process is gone, which is how the driver notices."""
        self._ended.wait()

    @ray.method(concurrency_group=CONTROL)
    def control(self, operation: str, args: Sequence[Any]) -> Any:
        """See ``host.control_answer``."""
        return load(f"{_HOST}:control_answer")(self._mailbox, self._pulse, operation, args)
