"""How long a rank was in collectives during a call.

On a CPU gloo does its work in threads of its own, and the work lane's thread sleeps until a collective is over: what it
neither computed nor waited for a core, it waited for other ranks. On a GPU NCCL's flight recorder has the time of every
collective on the device (those that overlap with kernels count too).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_SCHEDULER = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a core, nanoseconds waiting for one, turns."""


class CollectiveTime:
    """Seconds in collectives since ``begin``; to be asked in the thread that began.

    Args:
        device: ``cpu`` or ``cuda:i``.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._began = self._busy = 0.0
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1

    def begin(self) -> None:
        """Starts anew."""
        self._began, self._busy = time.time(), _busy_seconds()
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Until now."""
        if self._alone:
            return 0.0
        if self._on_gpu:
            return _nccl_seconds(self._began)
        return max(0.0, time.perf_counter() - self._start - (_busy_seconds() - self._busy))


def _busy_seconds() -> float:
    """Seconds that this thread computed or was kept from a core by others."""
    waited = int(_SCHEDULER.read_text().split()[1]) if _SCHEDULER.exists() else 0
    return time.thread_time() + waited / 1e9


def _nccl_seconds(since: float) -> float:
    """Device time of the collectives that were enqueued after ``since``. Not run here: needs NCCL."""
    recorder: Any = c10d
    entries = json.loads(recorder._dump_nccl_trace_json(True, False))["entries"]
    return sum(entry.get("duration_ms") or 0.0 for entry in entries if entry["time_created_ns"] >= since * 1e9) / 1e3
