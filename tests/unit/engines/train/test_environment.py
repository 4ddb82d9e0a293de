"""Environment of a training process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybridflow.engines.train.environment import WAITING, variables


def test_threads_are_capped_in_every_library() -> None:
    found = variables("cpu", 2, own_cores=True)
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "2"


def test_only_cuda_gets_allocator_settings() -> None:
    assert "PYTORCH_CUDA_ALLOC_CONF" in variables("cuda:1", 1, own_cores=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in variables("cpu", 1, own_cores=True)


@pytest.mark.parametrize(("own", "name"), [(True, "GOMP_SPINCOUNT"), (False, "OMP_WAIT_POLICY")])
def test_threads_wait_awake_on_their_own_cores_only(monkeypatch: pytest.MonkeyPatch, own: bool, name: str) -> None:
    for known in WAITING:
        monkeypatch.delenv(known, raising=False)
    assert [known for known in WAITING if known in variables("cpu", 2, own_cores=own)] == [name]


def test_a_way_to_wait_that_the_environment_names_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    found = variables("cpu", 2, own_cores=False)
    assert (found["OMP_WAIT_POLICY"], "GOMP_SPINCOUNT" in found) == ("ACTIVE", False)


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        variables("cpu", 0, own_cores=True)


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, hybridflow.engines.train.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
