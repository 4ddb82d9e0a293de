"""Environment of a training process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybridflow.engines.train.environment import variables


def test_threads_are_capped_in_every_library() -> None:
    found = variables("cpu", 2)
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "2"


def test_only_cuda_gets_allocator_settings() -> None:
    assert "PYTORCH_CUDA_ALLOC_CONF" in variables("cuda:1", 1)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in variables("cpu", 1)


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        variables("cpu", 0)


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, hybridflow.engines.train.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
