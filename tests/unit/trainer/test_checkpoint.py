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
        store.at(str(tmp_path / "global_step_2"))


def _steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in root.glob("global_step_*"))


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), {2, 4, 6, 8}),
        (Retention(newest=1), {8}),
        (Retention(newest=1, every=4), {4, 8}),
        (Retention(newest=1, best=True), {6, 8}),
        (Retention(newest=2, every=2, best=True), {2, 4, 6, 8}),
    ],
)
def test_the_newest_every_mth_and_the_best_stay(retention, kept):
    scores = {2: 0.5, 4: 0.9, 6: 0.9, 8: 0.1}  # of the two best the newer
    assert retention.stay(scores) == kept


def test_steps_without_a_score_are_never_the_best():
    assert Retention(newest=1, best=True).stay({1: None, 2: 0.0, 3: float("nan"), 4: None}) == {2, 4}


def test_the_best_is_remembered_by_the_folders_themselves(tmp_path):
    for step, score in ((1, 0.2), (2, 0.7), (3, 0.1)):
        # A new store each time, as a run that was started again has.
        store = CheckpointStore(tmp_path, Retention(newest=1, best=True))
        store.go_on_from(step - 1)
        _write(store.begin(step))
        store.complete(step, {}, score=score)
    assert _steps(tmp_path) == [2, 3]


def test_nothing_is_removed_before_the_newer_one_is_complete(tmp_path):
    store = CheckpointStore(tmp_path, Retention(newest=1))
    store.save(1, _write, {})
    _write(store.begin(2))
    assert store.newest().step == 1
    store.complete(2, {})
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_2"]


def test_checkpoints_beyond_the_start_of_a_run_are_moved_aside_by_its_first_save(tmp_path, caplog):
    """Or a later resume would take step 10 of a run that was given up for the newest of this one."""
    _store(tmp_path)
    fresh = CheckpointStore(tmp_path, Retention(newest=2))
    fresh.go_on_from(2)
    assert _steps(tmp_path) == [2, 4, 10], "nothing happens before this run has a checkpoint of its own"
    fresh.save(3, _write, {"step": 3})
    assert fresh.newest().step == 3
    assert damage_of(tmp_path / "global_step_10.replaced-1") is None
    assert "global_step_10.replaced-1" in caplog.text
    assert (tmp_path / "global_step_2").exists(), "what was moved aside does not count among the kept"


def test_what_interrupted_saves_left_behind_is_removed_by_the_next(tmp_path):
    store = _store(tmp_path, steps=(2,))
    _write(store.begin(4))
    (tmp_path / "global_step_1.pruned").mkdir()
    store.save(6, _write, {})
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_6"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', '{"files": {}}', "nul"])
def test_a_manifest_of_any_other_form_is_damage_not_a_crash(tmp_path, text, caplog):
    store = _store(tmp_path, steps=(2,))
    (tmp_path / "global_step_2" / MANIFEST).write_text(text)
    assert MANIFEST in str(damage_of(tmp_path / "global_step_2"))
    assert store.newest() is None
    assert f"no checkpoint below {tmp_path} can be used: the run begins anew" in caplog.text


def test_a_checkpoint_may_be_loaded_from_a_folder_of_any_name(tmp_path):
    store = _store(tmp_path, steps=(2,))
    (tmp_path / "global_step_2").rename(tmp_path / "the good one")
    assert store.at(str(tmp_path / "the good one")).step == 2


UNREADABLE = "/proc/self/mem"
"""A file of no size that answers a read with an error of the disk (EIO)."""


def test_a_file_that_cannot_be_read_is_damage_not_a_crash(tmp_path, caplog):
    store = _store(tmp_path)
    shard = tmp_path / "global_step_10" / "actor" / "shard_0.bin"
    manifest = tmp_path / "global_step_10" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"bytes": 256', '"bytes": 0'))
    for path, of in ((shard, 10), (tmp_path / "global_step_4" / MANIFEST, 4)):
        path.unlink()
        path.symlink_to(UNREADABLE)
        assert "cannot be read: [Errno 5]" in str(damage_of(tmp_path / f"global_step_{of}"))
    assert store.newest().step == 2
    assert "global_step_10 is skipped: actor/shard_0.bin cannot be read" in caplog.text


def test_a_link_in_place_of_a_file_counts_by_what_it_leads_to(tmp_path):
    _store(tmp_path)
    shard = tmp_path / "global_step_10" / "actor" / "shard_0.bin"
    twin = tmp_path / "elsewhere"
    shard.rename(twin)
    shard.symlink_to(twin)
    assert damage_of(tmp_path / "global_step_10") is None
    twin.write_bytes(bytes(256))
    assert "does not match its digest" in str(damage_of(tmp_path / "global_step_10"))
    twin.unlink()
    assert "actor/shard_0.bin is missing" in str(damage_of(tmp_path / "global_step_10"))
    shard.unlink()
    shard.mkdir()
    assert "actor/shard_0.bin is missing" in str(damage_of(tmp_path / "global_step_10"))


@pytest.mark.parametrize("manifest", [b"\xff\xfe", b"[]", b'{"score": "high", "files": {"x": 3}, "step": 2}'])
def test_a_damaged_older_one_keeps_nobody_from_saving(tmp_path, manifest):
    store = CheckpointStore(tmp_path, Retention(newest=1, best=True))
    store.save(2, _write, {})
    (tmp_path / "global_step_2" / MANIFEST).write_bytes(manifest)
    assert MANIFEST in str(damage_of(tmp_path / "global_step_2"))
    _write(store.begin(4))
    store.complete(4, {}, score=0.5)
    assert store.newest().step == 4
