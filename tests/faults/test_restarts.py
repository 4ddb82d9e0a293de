"""A run whose worker is killed starts again by itself and ends with the bits of a run that nobody disturbed."""

from __future__ import annotations

import os
import re
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from hybridflow.launch.restart import try_again
from hybridflow.single_controller import health
from hybridflow.utils.errors import DeadlineError, LostError, ShortageError, WorkerError
from tests import ranks
from tests.faults.kills import Kill, killing
from tests.invariants.test_resume import ASYNC, GRPO, STEPS, assert_same_end
from tests.jobs import run_job

TWO: dict[str, Any] = GRPO | {
    "trainer.n_gpus_per_node": 2,
    "trainer.save_freq": 1,
    "trainer.max_restarts": 4,
    "trainer.restart_backoff_s": 0.1,
}


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture(autouse=True)
def preloaded() -> None:
    """Ranks are forked from a server that has imported what they need: the session's, or the first job's would be."""
    assert ranks
    forkserver.ensure_running()


BEFORE_ANY_CHECKPOINT, IN_STEP_2, IN_STEP_3, IN_STEP_4 = (
    Kill("update_actor", 1),
    Kill("generate_sequences", 7),
    Kill("publish", 6),
    Kill("save_checkpoint", 4),
)
"""Numbers count calls over all tries: validation before the first step and the publish of each start are among them."""


@pytest.mark.parametrize(
    "phases",
    [
        (BEFORE_ANY_CHECKPOINT, Kill("save_checkpoint", 2)),
        pytest.param((BEFORE_ANY_CHECKPOINT, IN_STEP_2, IN_STEP_3, IN_STEP_4), marks=pytest.mark.slow),
    ],
    ids=["update and save", "update, generation, publish and save"],
)
def test_a_run_whose_worker_is_killed_goes_on_by_itself_and_ends_the_same(tmp_path, capsys, phases):
    children, shared = set(health.descendants([os.getpid()])), segments()
    with killing(*phases) as killed:
        run_job(tmp_path / "again", **TWO)
    said = capsys.readouterr().out
    for number, origin in enumerate(("where this command began", "the checkpoint of step 1"), start=1):
        assert f"restart {number} of 4 (trainer.max_restarts) in 0.1 s, from {origin}" in said
    assert health.wait_gone(killed, timeout_s=0.0) == []
    left = set(health.descendants([os.getpid()])) - children
    assert not left - set(_fork_server()), "a process of a try that failed lives on"
    pids = {str(pid) for pid in killed}
    assert not [name for name in segments() - shared if pids & set(re.findall(r"\d+", name))]
    run_job(tmp_path / "whole", **TWO)
    assert_same_end(tmp_path / "whole", tmp_path / "again")


def test_without_a_restart_left_the_loss_is_the_end_and_says_who_died(tmp_path):
    with (
        killing(Kill("update_actor", 1), Kill("update_actor", 2)),
        pytest.raises(LostError, match="rank 1 of 2") as got,
    ):
        run_job(tmp_path, **TWO | {"trainer.max_restarts": 1})
    assert "died during actor.update_actor" in str(got.value)
    assert not (tmp_path / f"global_step_{STEPS}").exists()


@pytest.mark.slow
def test_a_save_in_the_background_that_dies_with_its_worker_is_done_again(tmp_path):
    """A try that fails asks to finish its save too: the fourth time is behind the second or third step of the next."""
    with killing(Kill("checkpoint_written", 1), Kill("finish_checkpoint", 4)):
        run_job(tmp_path / "again", **TWO | ASYNC)
    run_job(tmp_path / "whole", **TWO | ASYNC)
    assert_same_end(tmp_path / "whole", tmp_path / "again")


def _fork_server() -> list[int]:
    """Helpers of multiprocessing that serve the whole session."""
    return [forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]


class Attempts:
    """Tries that end as they are told; time is not spent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Exception | int) -> None:
        self.ends = list(ends)
        self.saved = 0
        self.waits: list[float] = []
        self.said: list[str] = []
        monkeypatch.setattr("hybridflow.launch.restart.time.sleep", self.waits.append)

    def once(self) -> int:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def run(self, restarts: int, *, stop_asked: bool = False) -> int:
        return try_again(
            self.once,
            restarts=restarts,
            backoff_s=4.0,
            progress=lambda: self.saved,
            stop_asked=lambda: stop_asked,
            say=self.said.append,
        )


def test_waits_double_until_something_is_saved(monkeypatch):
    attempts = Attempts(monkeypatch, *[LostError("gone")] * 9, 7)
    assert attempts.run(9) == 7
    assert attempts.waits == [4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_a_new_checkpoint_makes_the_wait_short_again(monkeypatch):
    attempts = Attempts(monkeypatch, LostError("gone"), LostError("gone"), LostError("gone"), 7)
    once = attempts.once

    def saving() -> int:
        attempts.saved += len(attempts.ends) == 2
        return once()

    attempts.once = saving
    assert attempts.run(3) == 7
    assert attempts.waits == [4, 8, 4], "the third try saved something before it was lost"


@pytest.mark.parametrize("error", [WorkerError("raised"), ValueError("ours"), ShortageError("never fitted")])
def test_what_would_happen_again_is_not_tried_again(monkeypatch, error):
    attempts = Attempts(monkeypatch, error, 7)
    with pytest.raises(type(error)):
        attempts.run(3)
    assert attempts.waits == []


def test_slots_that_a_lost_node_took_along_are_waited_for(monkeypatch):
    attempts = Attempts(monkeypatch, LostError("node"), ShortageError("one slot"), DeadlineError("late"), 7)
    assert attempts.run(3) == 7


def test_a_run_that_was_told_to_end_is_not_started_again(monkeypatch):
    attempts = Attempts(monkeypatch, LostError("gone"), 7)
    with pytest.raises(LostError):
        attempts.run(3, stop_asked=True)
