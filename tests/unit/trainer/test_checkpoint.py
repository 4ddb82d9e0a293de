"""A checkpoint is complete and checked, or it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.trainer.checkpoint import MANIFEST, POINTER, STATE, CheckpointStore, Retention, damage_of
from hybridflow.utils.errors import StateError


def _write(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "shard_0.bin").write_bytes(bytes(range(256)))


def _store(root: Path, steps: tuple[int, ...] = (2, 4, 10), keep: int | None = None) -> CheckpointStore:
    store = CheckpointStore(root, Retention(newest=keep))
    for step in steps:
        store.save(step, _write, {"step": step})
    return store


def test_the_newest_is_found_by_number_and_brings_its_state(tmp_path):
    newest = _store(tmp_path).newest()
    assert newest is not None and newest.step == 10 and newest.state() == {"step": 10}
    assert (tmp_path / POINTER).read_text() == "10\n"


def test_no_folder_and_an_empty_folder_mean_a_fresh_start(tmp_path):
    assert CheckpointStore(tmp_path / "missing").newest() is None
    assert CheckpointStore(tmp_path).newest() is None


@pytest.mark.parametrize("name", ["actor/shard_0.bin", STATE, MANIFEST])
def test_a_newest_without_one_of_its_files_is_skipped_with_a_warning(tmp_path, caplog, name):
    store = _store(tmp_path)
    (tmp_path / "global_step_10" / name).unlink()
    newest = store.newest()
    assert newest is not None and newest.step == 4
    assert name in caplog.text and "global_step_10" in caplog.text


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"\xff" + data[1:]])
def test_a_cut_short_or_flipped_file_is_noticed(tmp_path, damage):
    _store(tmp_path)
    victim = tmp_path / "global_step_10" / "actor" / "shard_0.bin"
    victim.write_bytes(damage(victim.read_bytes()))
    assert "actor/shard_0.bin" in str(damage_of(tmp_path / "global_step_10"))


def test_a_save_that_dies_leaves_the_last_checkpoint_in_place(tmp_path):
    store = _store(tmp_path, steps=(2,))

    def die(folder: Path) -> None:
        _write(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.save(4, die, {})
    newest = store.newest()
    assert newest is not None and newest.step == 2 and (tmp_path / POINTER).read_text() == "2\n"
    store.save(4, _write, {"step": 4})
    assert store.newest().step == 4


def test_only_the_last_checkpoints_are_kept_and_never_fewer_than_one(tmp_path):
    _store(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_10", "global_step_4"]


def test_a_named_folder_that_is_not_complete_is_refused_with_the_reason(tmp_path):
    store = _store(tmp_path, steps=(2,))
    (tmp_path / "global_step_2" / STATE).unlink()
    with pytest.raises(StateError, match=f"{STATE} is missing"):
        store.at(tmp_path / "global_step_2")
