"""A copy of every checkpoint on another file system, and a run that goes on from it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hybridflow.launch.findings import _checkpoint
from hybridflow.trainer.checkpoint import MANIFEST, STATE, CheckpointStore, Retention, damage_of
from hybridflow.trainer.remote import RemoteFolder
from hybridflow.utils.errors import ConfigError, MachineError, StateError
from tests.invariants.test_resume import dying_after, tensors
from tests.jobs import read_metrics, run_job


def _write(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "shard_0.bin").write_bytes(folder.name.encode())


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """A folder of each file system that is always there."""
    if request.param == "file":
        return f"file://{tmp_path}/weit weg, größer #1/far"
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


def test_a_checkpoint_is_taken_from_a_url_and_its_copy_goes_with_the_first_save(tmp_path, url):
    _store(tmp_path / "there", url, (2, 4))
    store = CheckpointStore(tmp_path / "here")
    found = store.at(f"{url}/global_step_2/")
    assert found.step == 2 and found.state() == {"step": 2} and damage_of(found.folder) is None
    assert store.newest() is None, "what was fetched is no checkpoint of this run"
    store.go_on_from(2)
    store.save(3, _write, {"step": 3})
    assert [path.name for path in (tmp_path / "here").glob("global_step_*")] == ["global_step_3"]


def test_a_url_without_a_complete_checkpoint_is_refused(tmp_path, url):
    _store(tmp_path / "there", url, (2,))
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm(f"{root}/global_step_2/{MANIFEST}")
    store = CheckpointStore(tmp_path / "here")
    with pytest.raises(StateError, match=r"global_step_2 cannot be used: manifest\.json is missing"):
        store.at(f"{url}/global_step_2")
    with pytest.raises(MachineError, match="there is no .*global_step_9"):
        store.at(f"{url}/global_step_9")


class Silent(MemoryFileSystem):
    """Answers nothing: neither what it holds nor what is in a file."""

    protocol = "silent"
    released: ClassVar[threading.Event] = threading.Event()

    def exists(self, *args: Any, **kwargs: Any) -> bool:
        self.released.wait(30.0)
        return False

    find = get_file = exists


@pytest.mark.parametrize("ask", ["newest", "at", "findings"])
def test_a_file_system_that_does_not_answer_is_named_in_time(tmp_path, ask):
    """At the start of a run nobody else has a deadline for it."""
    fsspec.register_implementation("silent", Silent, clobber=True)
    Silent.released.clear()
    far = RemoteFolder("silent://bucket/run", deadline_s=0.3)
    store = CheckpointStore(tmp_path, remote=far, fetch_s=0.3)
    try:
        if ask == "findings":
            (finding,) = _checkpoint("trainer.resume_from_path", "silent://bucket/run/global_step_2", 0.3)
            assert finding.level == "error" and "within 0.3 s (trainer.timeouts.save_s)" in finding.text
            return
        with pytest.raises(MachineError, match=r"silent://bucket/run within 0.3 s \(trainer.timeouts.save_s\)"):
            store.newest() if ask == "newest" else store.at("silent://bucket/run/global_step_2")
    finally:
        Silent.released.set()


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


def test_what_is_damaged_here_is_fetched_again(tmp_path, url, caplog):
    store = _store(tmp_path / "here", url, (2, 4))
    (tmp_path / "here" / "global_step_4" / "actor" / "shard_0.bin").write_bytes(b"x")
    newest = store.newest()
    assert newest is not None and newest.step == 4 and damage_of(newest.folder) is None
    assert (tmp_path / "here" / "global_step_4.replaced-1").is_dir()
    assert "shard_0.bin has 1 bytes" in caplog.text


def test_a_copy_whose_manifest_is_damaged_is_left_out_and_keeps_nobody_from_saving(tmp_path, url, caplog):
    store = _store(tmp_path / "here", url, (2, 4))
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/global_step_4/{MANIFEST}", b'{"step": ')
    assert CheckpointStore(tmp_path / "elsewhere", remote=RemoteFolder(url)).newest().step == 2
    assert "global_step_4 is left out" in caplog.text
    store.save(6, _write, {})
    assert _there(url) == ["global_step_2", "global_step_6"]


class FailingFiles(MemoryFileSystem):
    """Refuses the files whose numbers, from the first that it was given, are in ``refused``."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    refused: ClassVar[set[int]] = set()
    given = 0

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        type(self).given += 1
        if self.given in self.refused:
            raise ConnectionResetError("the bucket has gone away")
        super().put_file(*args, **kwargs)


@pytest.fixture
def failing():
    fsspec.register_implementation("failing", FailingFiles, clobber=True)
    FailingFiles.store.clear()
    FailingFiles.pseudo_dirs[:] = [""]
    FailingFiles.given = 0
    return "failing://bucket/far"


def test_a_copy_that_breaks_off_is_nobodys_checkpoint_and_goes_with_the_next_whole_one(tmp_path, failing):
    """A checkpoint has three files here: of the second one, two arrive."""
    FailingFiles.refused = {6}
    store = _store(tmp_path / "here", failing, (2,))
    with pytest.raises(MachineError, match=r"far cannot be used: ConnectionResetError: the bucket has gone away"):
        store.save(4, _write, {})
    fs, root = fsspec.core.url_to_fs(failing)
    assert fs.exists(f"{root}/global_step_4/{STATE}")
    assert CheckpointStore(tmp_path / "lost", remote=RemoteFolder(failing)).newest().step == 2
    assert CheckpointStore(tmp_path / "here").newest().step == 4, "the one here is complete all the same"
    store.save(6, _write, {})
    assert _there(failing) == ["global_step_2", "global_step_6"]
    assert not fs.exists(f"{root}/global_step_4"), "what a broken copy left takes no room"


def test_a_run_goes_on_from_the_copy_alone_where_one_copy_broke_off(tmp_path, failing):
    """The folder of the run is lost behind step 3, whose copy had ended half-way."""
    options = {"trainer.total_training_steps": 4, "trainer.save_freq": 1, "actor_rollout_ref.actor.optim.lr": 1e-4}
    copied = options | {"trainer.checkpoint_copy": failing, "trainer.save_failure": "warn"}
    files = run_job(tmp_path / "whole", **options) and len(
        [path for path in (tmp_path / "whole" / "global_step_1").rglob("*") if path.is_file()]
    )
    FailingFiles.refused = {2 * files + 2}
    with dying_after(3):
        run_job(tmp_path / "here", **copied)
    assert read_metrics(tmp_path / "here")[-1]["step"] == 3
    shutil.rmtree(tmp_path / "here")
    run_job(tmp_path / "here", **copied)
    assert [row["step"] for row in read_metrics(tmp_path / "here")] == [3, 4], "it went on behind step 2"
    last = "global_step_4/actor"
    one, two = tensors(tmp_path / "whole" / last), tensors(tmp_path / "here" / last)
    assert [name for name in one if not one[name].equal(two[name])] == []
