"""The largest memory of a process while it does a phase of the step.

On a GPU it is the allocator's (what tensors took). On a CPU it is the resident memory of the process, everything
included; Linux keeps its high-water mark and lets a process reset its own. Where it cannot be reset it is the mark
since the process started.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_HIGH_WATER = "5"
_GB = 1e9


class PeakMemory:
    """Peaks by phase since the last ``take``.

    Args:
        device: ``cpu`` or ``cuda:i``.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._bytes: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keeps the peak of what happens inside under ``name``, the largest when it is entered more than once."""
        self._reset()
        try:
            yield
        finally:
            self._bytes[name] = max(self._bytes.get(name, 0), self._peak())

    def take(self) -> dict[str, float]:
        """``perf/max_memory_gb/<phase>``, 10^9 bytes, of every phase since the last call."""
        found = {f"perf/max_memory_gb/{name}": count / _GB for name, count in self._bytes.items()}
        self._bytes.clear()
        return found

    def _reset(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):
                _RESET.write_text(_RESET_HIGH_WATER)

    def _peak(self) -> int:
        if self._device.startswith("cuda"):
            return torch.cuda.max_memory_allocated(self._device)
        if _STATUS.exists():
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
