"""Sharded files: a stage is a copy, a failure is everybody's, and an index from elsewhere runs nothing."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hybridflow.engines.train.checkpoint import StateSave, load_state
from hybridflow.engines.train.random_state import random_state, set_random_state
from hybridflow.engines.train.shards import ShardWriter, read, read_index
from hybridflow.utils.errors import MachineError
from tests.ranks import run_ranks


def _state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"model/a": torch.full((3, 2), value), "optim/step/a": torch.tensor(value), "b": torch.ones(2).bfloat16()}


def _save(folder: Path, state: dict[str, torch.Tensor], *, staged: bool = False) -> None:
    writer = ShardWriter(str(folder), state, staged=staged)
    writer.write()
    writer.finish(lambda: None)


def _read_all(folder: Path) -> dict[str, torch.Tensor]:
    index = read_index(str(folder))
    state = {name: torch.zeros(meta.size, dtype=meta.properties.dtype) for name, meta in index.items()}
    read(str(folder), state)
    return state


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_written_is_read(tmp_path, staged):
    _save(tmp_path, _state(), staged=staged)
    found = _read_all(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in _state().items()) and len(found) == 3


def test_torchs_own_reader_reads_it_too(tmp_path):
    _save(tmp_path, _state())
    found = {name: torch.zeros_like(value) for name, value in _state().items()}
    dcp.load(found, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(found["model/a"], _state()["model/a"])


def test_a_staged_save_writes_what_was_there_when_it_began(tmp_path):
    state = _state(1.0)
    writer = ShardWriter(str(tmp_path), state, staged=True)
    state["model/a"].fill_(9.0)
    writer.write()
    writer.finish(lambda: None)
    assert torch.equal(_read_all(tmp_path)["model/a"], _state(1.0)["model/a"])


class _Evil:
    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


def test_an_index_that_would_run_code_is_refused(tmp_path):
    _save(tmp_path / "ok", _state())
    (tmp_path / "ok" / ".metadata").write_bytes(pickle.dumps(_Evil(tmp_path / "broken_in")))
    with pytest.raises(MachineError, match=r"asks for posix\.mkdir"):
        read_index(str(tmp_path / "ok"))
    assert not (tmp_path / "broken_in").exists()
    pickle.loads((tmp_path / "ok" / ".metadata").read_bytes())
    assert (tmp_path / "broken_in").exists(), "the index would have run its code"


def test_an_entry_that_is_a_pickled_object_is_refused(tmp_path):
    """torch's planner would unpickle it without ``weights_only``."""
    dcp.save({"model/a": _Evil(tmp_path / "broken_in")}, checkpoint_id=str(tmp_path / "made"), no_dist=True)
    with pytest.raises(MachineError, match="model/a of .* is no tensor"):
        read(str(tmp_path / "made"), {"model/a": torch.zeros(1)})
    assert not (tmp_path / "broken_in").exists()


def test_random_streams_that_would_run_code_are_refused(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    StateSave(str(tmp_path / "ok"), {"w": weight}, None, {})
    torch.save(_Evil(tmp_path / "broken_in"), tmp_path / "ok" / "rng_0.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_state(str(tmp_path / "ok"), {"w": weight}, None)
    assert not (tmp_path / "broken_in").exists()


@pytest.mark.parametrize("damage", [b"", b"\x80\x04", b"nothing of that kind"])
def test_a_damaged_index_is_named(tmp_path, damage):
    _save(tmp_path, _state())
    (tmp_path / ".metadata").write_bytes(damage)
    with pytest.raises(MachineError, match="no index of a checkpoint"):
        read_index(str(tmp_path))


def test_contents_decide_what_is_saved_and_what_is_loaded(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    StateSave(str(tmp_path / "all"), {"w": weight}, optimizer, {"done": 3})
    StateSave(str(tmp_path / "model"), {"w": weight}, optimizer, {"done": 3}, contents=("model",))
    assert list(read_index(str(tmp_path / "model"))) == ["model/w"]
    with pytest.raises(MachineError, match="saved without extra, optimizer"):
        load_state(str(tmp_path / "model"), {"w": weight}, optimizer)
    other = torch.nn.Parameter(torch.zeros(2))
    fresh = torch.optim.AdamW([other], lr=0.1)
    assert load_state(str(tmp_path / "all"), {"w": other}, fresh, contents=("model",))["done"] == 3
    assert torch.equal(other, weight) and not fresh.state
    load_state(str(tmp_path / "all"), {"w": other}, fresh, contents=("optimizer",))
    assert torch.equal(fresh.state[other]["exp_avg"], optimizer.state[weight]["exp_avg"])


def test_all_streams_go_on_where_they_were():
    state = random_state()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    set_random_state(state)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn


def _one_rank_cannot_write(folder: str) -> str:
    rank = dist.get_rank()
    writer = ShardWriter(folder, {f"of_{rank}": torch.ones(3)}, staged=False)
    if rank == 1:
        (Path(folder) / "__1_0.distcp").mkdir()  # where its file should be
    writer.write()
    with pytest.raises(MachineError) as refused:
        writer.finish(lambda: None)
    return str(refused.value)


def test_a_rank_that_cannot_write_fails_all_of_them_and_none_waits(tmp_path):
    texts = run_ranks(2, _one_rank_cannot_write, str(tmp_path), deadline_s=60.0)
    assert texts[0] == texts[1]
    assert "cannot be written (rank 1: IsADirectoryError" in texts[0]
