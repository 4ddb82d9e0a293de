"""A copy of every checkpoint on another file system, and a run that goes on from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from hybridflow.trainer.checkpoint import MANIFEST, CheckpointStore, Retention, damage_of
from hybridflow.trainer.remote import RemoteFolder
from hybridflow.utils.errors import ConfigError, MachineError


def _write(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "shard_0.bin").write_bytes(folder.name.encode())


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """A folder of each file system that is always there."""
    if request.param == "file":
        return f"file://{tmp_path}/far"
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/far"


def _store(root: Path, url: str, steps: tuple[int, ...], retention: Retention | None = None) -> CheckpointStore:
    store = CheckpointStore(root, retention, remote=RemoteFolder(url))
    for step in steps:
        store.save(step, _write, {"step": step})
    return store


def _there(url: str) -> list[str]:
    return sorted(RemoteFolder(url).complete(last=MANIFEST))


def test_a_run_on_an_empty_disk_fetches_the_newest(tmp_path, url):
    _store(tmp_path / "here", url, (2, 4))
    assert _there(url) == ["global_step_2", "global_step_4"]
    shutil.rmtree(tmp_path / "here")
    newest = CheckpointStore(tmp_path / "here", remote=RemoteFolder(url)).newest()
    assert newest is not None and newest.step == 4 and newest.state() == {"step": 4}
    assert damage_of(newest.folder) is None


def test_what_is_here_is_not_fetched(tmp_path, url):
    store = _store(tmp_path / "here", url, (2,))
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/global_step_2/actor/shard_0.bin", b"changed over there")
    assert damage_of(store.newest().folder) is None


def test_a_copy_without_manifest_is_not_there_and_a_damaged_one_is_skipped(tmp_path, url):
    _store(tmp_path / "here", url, (2, 4, 6))
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm(f"{root}/global_step_6/{MANIFEST}")
    fs.pipe_file(f"{root}/global_step_4/actor/shard_0.bin", b"x")
    newest = CheckpointStore(tmp_path / "elsewhere", remote=RemoteFolder(url)).newest()
    assert newest is not None and newest.step == 2


def test_the_same_ones_stay_there_as_here(tmp_path, url):
    _store(tmp_path / "here", url, (1, 2, 3, 4, 5), Retention(newest=1, every=2))
    assert _there(url) == ["global_step_2", "global_step_4", "global_step_5"]


def test_steps_of_a_run_that_was_given_up_are_moved_aside_there_too(tmp_path, url):
    _store(tmp_path / "old", url, (2, 9))
    store = CheckpointStore(tmp_path / "new", remote=RemoteFolder(url))
    store.go_on_from(2)
    store.save(3, _write, {})
    assert _there(url) == ["global_step_2", "global_step_3", "global_step_9.replaced-1"]
    newest = CheckpointStore(tmp_path / "empty", remote=RemoteFolder(url)).newest()
    assert newest is not None and newest.step == 3


def test_a_file_system_that_refuses_is_named(tmp_path):
    (tmp_path / "far").write_text("a file where a folder should be")
    store = CheckpointStore(tmp_path / "here", remote=RemoteFolder(f"file://{tmp_path}/far"))
    with pytest.raises(MachineError, match="far cannot be used"):
        store.save(1, _write, {})
    assert CheckpointStore(tmp_path / "here").newest().step == 1, "the checkpoint here is complete all the same"


def test_an_unknown_protocol_is_an_error_of_the_configuration():
    with pytest.raises(ConfigError, match=r"checkpoint_copy=nowhere://x"):
        RemoteFolder("nowhere://x")
