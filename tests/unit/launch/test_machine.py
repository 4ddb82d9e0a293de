from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hybridflow.launch import machine
from hybridflow.launch.machine import Gpu, Machine, inspect_machine


def test_this_machine_has_cores_and_memory():
    found = inspect_machine()
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert 0 < found.available_bytes <= found.memory_bytes


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["a", "b"]), ("", []), ("1", ["b"]), ("1,0", ["b", "a"]), ("0,7,1", ["a"]), ("-1", []), ("GPU-x", ["a"])],
)
def test_only_visible_gpus_count(monkeypatch, visible, names):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in machine._visible((Gpu("a", 1), Gpu("b", 1)))] == names


@pytest.mark.parametrize(
    ("gpus", "build", "usable"),
    [
        ((), "2.9.0", False),
        ((Gpu("a", 1),), "2.9.0", True),
        ((Gpu("a", 1),), "2.13.0+cpu", False),
        ((Gpu("a", 1),), None, False),
    ],
)
def test_cuda_needs_a_gpu_and_a_torch_that_can_use_it(gpus, build, usable):
    found = Machine(cores=1, memory_bytes=1, available_bytes=1, gpus=gpus, torch_build=build)
    assert found.cuda_usable is usable


def test_work_of_other_processes_is_seen_and_our_own_is_not() -> None:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        time.sleep(0.3)
        assert inspect_machine().busy_cores > 0.5  # of two that spin, whatever else runs here
    finally:
        for other in others:
            other.kill()
            other.wait()
