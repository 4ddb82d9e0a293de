"""The largest memory of a process while it does a phase of the step.

On a GPU it is the allocator's (what tensors took). On a CPU it is the resident memory of the process, everything
included; Linux keeps its high-water mark and lets a process reset its own. Where it cannot be reset it is the mark
since the process started.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_HIGH_WATER = "5"


class PeakMemory:
    """The highest memory of this process since the last ``reset``.

    Args:
        device: ``cpu`` or ``cuda:i``.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def reset(self) -> None:
        """Starts anew."""
        if self._device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # a kernel that refuses: the peak is then that of the whole life of the process
                _RESET.write_text(_RESET_HIGH_WATER)

    def bytes(self) -> int:
        """The highest number of bytes held at one time."""
        if self._device.startswith("cuda"):
            return torch.cuda.max_memory_allocated(self._device)
        if _STATUS.exists():
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
