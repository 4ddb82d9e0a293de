"""A disk that refuses a checkpoint: the one before stays loadable, and the run stops with the reason or goes on loudly.

The limit on file sizes (RLIMIT_FSIZE) stands for a full disk: the kernel refuses the write in the middle of a file.
Where a file system may be mounted, a small one is really filled, and really made read-only, between two steps.
"""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hybridflow.trainer.checkpoint import CheckpointStore, damage_of
from hybridflow.trainer.run import Run
from hybridflow.utils.errors import MachineError
from tests.invariants.test_resume import dying_after, lines
from tests.jobs import read_metrics, run_job

RUN: dict[str, Any] = {
    "trainer.total_training_steps": 4,
    "trainer.save_freq": 1,
    "actor_rollout_ref.actor.optim.lr": 1e-4,
}
ASYNC: dict[str, Any] = {"actor_rollout_ref.actor.checkpoint.async_save": True}
WARN: dict[str, Any] = {"trainer.save_failure": "warn"}
HF: dict[str, Any] = {"actor_rollout_ref.actor.checkpoint.save_contents": ["hf_model", "model", "optimizer", "extra"]}
FILE_BYTES = 1 << 20
"""More than the metrics of a run, less than a checkpoint."""


@contextmanager
def full_disk() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_last_one_stands(folder: Path, step: int) -> None:
    newest = CheckpointStore(folder).newest()
    assert newest is not None and newest.step == step
    assert damage_of(newest.folder) is None
    assert list(folder.glob("*.partial")) == [], "the space of the failed save is given back"


@pytest.mark.parametrize("options", [{}, ASYNC, HF], ids=["sync", "async", "export"])
def test_a_full_disk_stops_the_run_and_nothing_is_lost(tmp_path, options):
    options = RUN | options
    with dying_after(2):
        run_job(tmp_path / "again", **options)
    with (
        full_disk(),
        pytest.raises(MachineError, match=r"checkpoint of step 3 could not be written .*(\n|.)*stops here"),
    ):
        run_job(tmp_path / "again", **options)
    assert_last_one_stands(tmp_path / "again", 2)
    run_job(tmp_path / "again", **options)
    run_job(tmp_path / "whole", **options)
    assert lines(tmp_path / "again") == lines(tmp_path / "whole")


@pytest.mark.parametrize("options", [{}, ASYNC], ids=["sync", "async"])
def test_by_option_the_run_goes_on_and_counts_what_it_could_not_save(tmp_path, options, caplog):
    options = RUN | options | WARN
    with dying_after(2):
        run_job(tmp_path, **options)
    with full_disk():
        run_job(tmp_path, **options)
    assert_last_one_stands(tmp_path, 2)
    steps = read_metrics(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step.get("checkpoint/failed_saves") for step in steps] == [None, None, None, 1]


@pytest.mark.parametrize("key", ["rollout_data_dir", "validation_data_dir"])
def test_samples_that_cannot_be_written_stop_the_run_in_words_or_not_at_all(tmp_path, key, capfd):
    (tmp_path / "file").write_text("")
    options = {f"trainer.{key}": str(tmp_path / "file" / "below"), "trainer.total_training_steps": 1}
    with pytest.raises(
        MachineError, match=rf"samples of step 1 could not be written to trainer\.{key}=.*Not a directory"
    ):
        run_job(tmp_path / "one", **options)
    assert [row["step"] for row in run_job(tmp_path / "two", **options, **WARN)] == [1]
    assert "Training goes on" in capfd.readouterr().err


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 48 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", folder], check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))


def empty(disk: Path) -> None:
    (disk / "filler").unlink(missing_ok=True)


def forbid(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def allow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


@contextmanager
def happening(behind: dict[int, Callable[[], None]]) -> Iterator[None]:
    """Inside, something happens behind some steps of a run."""
    after = Run.after

    def eventful(run: Run, done: int) -> None:
        after(run, done)
        behind.get(done, lambda: None)()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "after", eventful)
        yield


@pytest.mark.parametrize(("trouble", "cure"), [(fill, empty), (forbid, allow)], ids=["full", "read-only"])
@pytest.mark.parametrize("options", [{}, WARN], ids=["stop", "warn"])
def test_a_disk_that_is_full_or_read_only_for_a_step_loses_that_checkpoint_alone(disk, options, trouble, cure):
    run = disk / "run"
    with happening({1: lambda: trouble(disk), 2: lambda: cure(disk)}):
        if options:
            run_job(run, **RUN | options)
        else:
            with pytest.raises(MachineError, match=r"step 2 could not be written .*(\n|.)*stops here"):
                run_job(run, **RUN)
            cure(disk)
            assert_last_one_stands(run, 1)
            run_job(run, **RUN)
    saved = [step for step in range(1, 5) if (run / f"global_step_{step}").exists()]
    assert saved == ([1, 3, 4] if options else [1, 2, 3, 4])
    assert_last_one_stands(run, 4)
    last = read_metrics(run)[-1]
    assert (last["step"], last.get("checkpoint/failed_saves")) == (4, 1 if options else None)


def test_a_folder_that_takes_no_checkpoint_is_named(tmp_path):
    """Whoever is root may write anywhere: a file where the folder should be is refused to everyone."""
    with dying_after(1):
        run_job(tmp_path, **RUN)
    (tmp_path / "global_step_2.partial").write_text("in the way")
    with pytest.raises(MachineError, match=r"step 2 could not be written below .*NotADirectoryError"):
        run_job(tmp_path, **RUN)
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None and newest.step == 1


def test_a_checkpoint_cut_short_is_skipped_and_the_run_ends_the_same(tmp_path):
    """Any of its files will do: tests/unit/trainer/test_checkpoint.py."""
    with dying_after(3):
        run_job(tmp_path / "again", **RUN)
    victim = tmp_path / "again" / "global_step_3" / "actor" / "__0_0.distcp"
    victim.write_bytes(victim.read_bytes()[:-10])
    run_job(tmp_path / "again", **RUN)
    run_job(tmp_path / "whole", **RUN)
    assert lines(tmp_path / "again") == lines(tmp_path / "whole")
    assert (tmp_path / "again" / "global_step_3.replaced-1").exists()
