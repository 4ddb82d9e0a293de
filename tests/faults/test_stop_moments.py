"""A signal at awkward moments of a run in this process: nothing is lost, and the exit code says what happened.

Real processes and a second signal: tests/faults/test_checkpoint_signals.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridflow.launch import build
from hybridflow.launch.preflight import plan_run
from hybridflow.launch.signals import StopSignals
from hybridflow.trainer.checkpoint import CheckpointStore
from hybridflow.trainer.run import Run
from tests.invariants.test_resume import lines
from tests.jobs import run_job, small_config

RUN: dict[str, Any] = {
    "data.train_batch_size": 4,
    "data.generated_val_size": 4,
    "actor_rollout_ref.rollout.n": 2,
    "trainer.total_training_steps": 2,
    "trainer.save_freq": 7,
    "trainer.test_freq": 1,
    "trainer.val_before_train": True,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a signal."""
    folder = tmp_path_factory.mktemp("whole")
    run_job(folder, **RUN)
    return folder


def signalling(function: Callable[..., Any], number: signal.Signals, at: int | None) -> Callable[..., Any]:
    """``function``, in whose call for step ``at`` (None: in any) the signal comes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if at is None or at in args:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("place", "name", "at", "code", "saved"),
    [
        (build, "read_prompts", None, 143, None),
        (Run, "_validate", 0, 130, None),
        (Run, "_validate", 1, 143, 1),
        (CheckpointStore, "complete", 2, 0, 2),
    ],
    ids=["start", "first validation", "validation", "last save"],
)
def test_a_signal_at_any_moment_loses_nothing(tmp_path, whole, place, name, at, code, saved):
    number = signal.SIGINT if code == 130 else signal.SIGTERM
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    config = small_config(tmp_path / "again", **RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, signalling(getattr(place, name), number, at))
        assert build.run(config, plan_run(config)) == code
    newest = CheckpointStore(tmp_path / "again").newest()
    assert (None if newest is None else newest.step) == saved
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    run_job(tmp_path / "again", **RUN)
    assert lines(tmp_path / "again") == lines(whole)


@pytest.mark.parametrize(
    ("saves", "told"), [(True, "finished and saved, then"), (False, "finished, and not saved (trai")]
)
def test_a_signal_says_whether_the_step_will_be_saved(caplog, saves, told):
    with StopSignals(saves=saves) as signals:
        signals.arm()
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.exit_code == 143 and told in caplog.text
