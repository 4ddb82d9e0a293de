"""Environment variables that a training process needs before it imports torch. Imports nothing heavy."""

from __future__ import annotations

import os

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""How OpenMP's threads wait for each other; what the environment says already is kept."""
SPINS = "300000"
"""libgomp's own count for threads that have a core each, about 10 ms."""


def variables(device: str, threads: int, *, own_cores: bool) -> dict[str, str]:
    """Variables by name for a process on ``device`` (``cpu``, ``cuda`` or ``cuda:i``) that may use ``threads`` threads.

    Args:
        own_cores: whether nobody else needs the cores of these threads: then they wait for each other awake.

    Raises:
        ValueError: when ``threads`` is below 1.
    """
    if threads < 1:
        raise ValueError(f"a process needs at least one thread, got threads={threads}")
    found = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not device.startswith("cuda"):
        found |= _waiting(own_cores)
    if device.startswith("cuda"):
        # Growing segments keep long and short packed micro-batches from fragmenting the allocator.
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        # perf/communication_s reads every collective of a call, with its time on the device.
        found["TORCH_FR_BUFFER_SIZE"] = "20000"
        found["TORCH_NCCL_ENABLE_TIMING"] = "1"
    return found


def _waiting(own_cores: bool) -> dict[str, str]:
    """Awake on own cores: a step of a small model takes 0.39 s instead of 0.56 s (docs/design/0005).

    Asleep otherwise: awake on a core that somebody else needs made a step 10 to 20 times slower.
    """
    given = {name: os.environ[name] for name in WAITING if name in os.environ}
    return given or ({"GOMP_SPINCOUNT": SPINS} if own_cores else {"OMP_WAIT_POLICY": "PASSIVE"})
