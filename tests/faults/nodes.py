"""A Ray cluster of two real nodes on one machine, started by ``scripts/ray_node.sh`` as an operator would."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybridflow.single_controller import health
from hybridflow.single_controller.cluster import LOOPBACK_SWITCH, SLOT

REPO = Path(__file__).parents[2]
START_S = 120.0


class Nodes:
    """Head and worker, each with its own slots; ``enter`` is put before every command of a node.

    Args:
        folder: logs of the daemons.
        slots: logical slots of each node.
        enter: by node, the words that run a command there (a network namespace); empty: on this machine.
        host: address of the head.
        dashboard: whether the head runs Ray's dashboard, which jobs are submitted to.
        of_worker: further variables of the worker's daemons.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 1,
        enter: Sequence[Sequence[str]] = ((), ()),
        host: str | None = None,
        dashboard: bool = False,
        of_worker: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host or _own_address()
        self.port = _free_port()
        self.address = f"{self.host}:{self.port}"
        self.dashboard_port = _free_port() if dashboard else None
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), LOOPBACK_SWITCH: "1"}
        """Variables of whoever may talk to the cluster: it listens on an address that others can reach. A Ray of this
        test process, which stays on loopback, may have left its switch in the environment."""
        self._folder = folder
        self._slots = slots
        self._of_worker = dict(of_worker or {})
        self._enter = [list(words) for words in enter]
        self._session = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets: the path must be short
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def enter(self, kind: str) -> list[str]:
        """Words that run a command on that node."""
        return self._enter[kind == "worker"]

    def start(self, kind: str, *arguments: str) -> None:
        """Starts ``head`` or ``worker``; ``ready`` waits for it."""
        words = ["head", str(self.port), f"--temp-dir={self._session}"] if kind == "head" else ["worker", self.address]
        words += ["--num-cpus=1", f'--resources={{"{SLOT}": {self._slots}}}', "--min-worker-port=0"]
        words += ["--max-worker-port=0", "--object-store-memory=150000000", *arguments]
        if kind == "head":
            words += ["--include-dashboard=false"] if self.dashboard_port is None else ["--include-dashboard=true"]
            words += [] if self.dashboard_port is None else [f"--dashboard-port={self.dashboard_port}"]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | self.token
        environment["HYBRIDFLOW_VENV"] = str(Path(sys.executable).parents[1])
        environment["RAY_enable_metrics_collection"] = "0"
        environment["OMP_NUM_THREADS"] = "1"
        environment |= self._of_worker if kind == "worker" else {}
        log = (self._folder / f"{kind}.log").open("ab")
        command = [*self.enter(kind), "bash", str(REPO / "scripts" / "ray_node.sh"), *words]
        self._started[kind] = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def ready(self, kind: str) -> None:
        """Waits until the node says that it runs."""
        until = time.monotonic() + START_S
        log = self._folder / f"{kind}.log"
        while log.read_bytes().count(b"Ray runtime started") < 1:
            assert self._started[kind].poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)

    def processes(self, kind: str) -> list[int]:
        """Every process of a node: its daemons and what they started."""
        first = self._started[kind].pid
        return [first, *health.descendants([first])]

    def kill(self, kind: str) -> None:
        """What pulling the plug does: all processes of the node are gone at once."""
        health.kill(self.processes(kind))
        self._started.pop(kind).wait()
        (self._folder / f"{kind}.log").write_bytes(b"")

    def end(self) -> None:
        """Kills both nodes and removes what they left."""
        everyone = [pid for kind in self._started for pid in self.processes(kind)]
        health.kill(everyone)
        for process in self._started.values():
            process.wait()
        health.remove_segments(everyone, [])
        shutil.rmtree(self._session, ignore_errors=True)


@contextmanager
def two_nodes(folder: Path, **settings: object) -> Iterator[Nodes]:
    """Both nodes, running."""
    nodes = Nodes(folder, **settings)  # type: ignore[arg-type]
    try:
        nodes.start("head")
        nodes.ready("head")
        nodes.start("worker")
        nodes.ready("worker")
        yield nodes
    finally:
        nodes.end()


def _own_address() -> str:
    """This machine's address; Ray replaces a loopback address by it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
