"""Environment variables that a training process needs before it imports torch. Imports nothing heavy."""

from __future__ import annotations


def variables(device: str, threads: int) -> dict[str, str]:
    """Variables by name for a process on ``device`` (``cpu``, ``cuda`` or ``cuda:i``) that may use ``threads`` threads.

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
        # Spinning barriers on a core that somebody else needs made a training step 10 to 20 times slower.
        found["OMP_WAIT_POLICY"] = "PASSIVE"
    if device.startswith("cuda"):
        # Growing segments keep long and short packed micro-batches from fragmenting the allocator.
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        # perf/communication_s reads every collective of a call, with its time on the device.
        found["TORCH_FR_BUFFER_SIZE"] = "20000"
        found["TORCH_NCCL_ENABLE_TIMING"] = "1"
    return found
