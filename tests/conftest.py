"""What holds for every test: the environment of a run here, set before torch or vLLM is imported, and skipped markers.

Whoever exports another value (a GPU machine, a debugger) wins.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from jaxtyping import install_import_hook

import tests.shapes  # noqa: F401  (the hook looks it up as an attribute of ``tests``)
from hybridflow.engines.rollout import environment

HAS_GPU = shutil.which("nvidia-smi") is not None
_DEVICE = "cuda" if HAS_GPU else "cpu"
_ENVIRONMENT = {
    **environment.variables("vllm", _DEVICE),
    "OMP_NUM_THREADS": "1",  # two spinning OpenMP teams on busy cores are 15 times slower
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "RAY_USAGE_STATS_ENABLED": "0",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
for _name in (*environment.unset("vllm", _DEVICE), "COLUMNS", "LINES"):  # readline sets a width where there is none
    os.environ.pop(_name, None)

CHECKED_ROOMS = ("hybridflow.algorithms", "hybridflow.models")
"""Rooms that compute with tensors: their shape annotations are checked at every call (tests/shapes.py)."""
install_import_hook(CHECKED_ROOMS, "tests.shapes.check")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, naming the reason; real models run only when ``-m`` asks for them."""
    asked = config.getoption("markexpr", default="")
    missing = {
        "gpu": None if HAS_GPU else "needs an NVIDIA GPU",
        "vllm": None if importlib.util.find_spec("vllm") else "needs vllm",
        "ray": None if importlib.util.find_spec("ray") else "needs ray",
        "real_model": None
        if asked.replace("not real_model", "").count("real_model")
        else "runs only with -m real_model",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Our own Ray with two logical slots, one per session: its start costs seconds. Imported only where it is used."""
    from hybridflow.single_controller.cluster import SLOT, start_ray, stop_ray

    started = start_ray({"resources": {SLOT: 2}})
    yield started
    stop_ray(started)
