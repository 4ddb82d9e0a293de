"""Environment variables that the rollout backends read while they are imported.

They are an output of the plan: the launcher passes them to the processes that host an engine, before python starts
there. This module imports nothing, so that a torch-free dry run can print them. Thread counts belong to the training
side (``engines/train/environment.py``).
"""

from __future__ import annotations

VLLM_COMMON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in our process: its weights are slices we can write
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second runner refuses our logits processor and was never measured
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are advice for servers, ten lines per rank; errors are raised
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
VLLM_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # the sampler's compiled helper costs 5 s of g++ at the first step
}


def variables(name: str, device: str) -> dict[str, str]:
    """Variables that must be set before torch and the backend are imported, by backend name and device type."""
    if name != "vllm":
        return {"TOKENIZERS_PARALLELISM": "false"}
    return {**VLLM_COMMON, **(VLLM_CPU if device == "cpu" else {})}


def unset(name: str, device: str) -> tuple[str, ...]:
    """Variables that must not be set there."""
    if name == "vllm" and device == "cpu":
        return ("VLLM_CPU_KVCACHE_SPACE",)  # whole GiB, and it overrides the size that we give
    return ()
