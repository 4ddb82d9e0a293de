"""What holds for every test: the environment of a CPU run, set before torch or vLLM is imported, and skipped markers.

``setdefault``: whoever exports another value (a GPU machine, a debugger) wins.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # two spinning OpenMP teams on busy cores are 15 times slower
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
HAS_GPU = shutil.which("nvidia-smi") is not None
if not HAS_GPU:
    _ENVIRONMENT["TORCHDYNAMO_DISABLE"] = "1"  # on CPU: 5 s of compiler at the first sampled log-prob
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and it overrides the engine's own size

import pytest  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, naming the reason; ``-m real_model`` asks for real models explicitly."""
    asked = config.getoption("markexpr", default="")
    missing = {
        "gpu": None if HAS_GPU else "needs an NVIDIA GPU",
        "vllm": None if importlib.util.find_spec("vllm") else "needs vllm",
        "ray": None if importlib.util.find_spec("ray") else "needs ray",
        "real_model": None if "real_model" in asked else "runs only with -m real_model",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


