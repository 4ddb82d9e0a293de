"""What this machine has, found without importing torch and without starting a process."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_NVML = "libnvidia-ml.so.1"
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources of the node on which the command runs."""

    cores: int
    """CPU cores that this process may use."""
    memory_bytes: int
    """Host memory that this process may use."""
    available_bytes: int
    """Of which nobody uses now."""
    busy_cores: float = 0.0
    """Cores that other processes keep busy now."""
    gpus: tuple[Gpu, ...] = ()
    torch_build: str | None = None
    """Version of the installed torch; None: not installed."""

    @property
    def cuda_usable(self) -> bool:
        """Whether there is a GPU and a torch that is not built for CPU alone."""
        return bool(self.gpus) and self.torch_build is not None and "+cpu" not in self.torch_build


def inspect_machine() -> Machine:
    """This machine: cores and memory within the limits of its container, GPUs as CUDA_VISIBLE_DEVICES lets through."""
    memory = psutil.virtual_memory()
    limit, used = _cgroup_memory()
    total = min(memory.total, limit) if limit else memory.total
    free = min(memory.available, total - used) if limit else memory.available
    return Machine(
        cores=_cores(),
        memory_bytes=total,
        available_bytes=free,
        busy_cores=_busy_cores(),
        gpus=_visible(_gpus()),
        torch_build=_torch_build(),
    )


def _cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def _busy_cores() -> float:
    """Cores that others kept busy during a short look, this process's own work left out."""

    def worked() -> float:
        machine, own = psutil.cpu_times(), os.times()
        return machine.user + machine.nice + machine.system - own.user - own.system

    before, start = worked(), time.monotonic()
    time.sleep(_LOOK_S)
    return max(0.0, (worked() - before) / (time.monotonic() - start))


def _cgroup_memory() -> tuple[int, int]:
    """Memory limit of this container and what it uses, in bytes; 0: no limit."""
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return (int(limit), int(used)) if limit.isdigit() and used.isdigit() else (0, 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # no such control group: no limit
        return ""


def _torch_build() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _visible(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return gpus
    found = []
    for name in asked.split(","):
        if name.strip().startswith(("GPU-", "MIG-")):  # by name: which one does not matter, that there is one does
            found += gpus[:1]
        elif name.strip().isdigit() and int(name) < len(gpus):
            found.append(gpus[int(name)])
        else:
            break  # CUDA ignores what follows a number that does not exist
    return tuple(found)


def _gpus() -> tuple[Gpu, ...]:
    """All GPUs of this node, asked of the driver's own library."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:  # no driver: no GPU
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        return tuple(_gpu(nvml, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
    known = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0
    if known:
        nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(96))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Gpu(name=name.value.decode() or "GPU", memory_bytes=memory.total)
