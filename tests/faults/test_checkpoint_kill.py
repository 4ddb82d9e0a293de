"""kill -9 on the job while a checkpoint may be half written; the same command then ends as if nothing had happened."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hybridflow.single_controller import health
from tests.faults.job import start_job
from tests.invariants.test_resume import ASYNC, PPO, TWO_RANKS, assert_same_end
from tests.jobs import run_job

pytestmark = pytest.mark.slow

EVERY_STEP: dict[str, Any] = PPO | {"trainer.save_freq": 1, "trainer.threads_per_worker": 1}
"""One thread, as this process has: bits depend on it."""


def kill_behind(step: int, folder: Path, options: dict[str, Any]) -> None:
    job = start_job(folder, options, die_after=step)
    try:
        output = job.communicate(timeout=120)[0]
        assert job.returncode == -signal.SIGKILL, output
    finally:
        health.kill([job.pid, *health.descendants([job.pid])])


@pytest.mark.parametrize("options", [ASYNC, ASYNC | TWO_RANKS], ids=["one rank", "two ranks"])
def test_a_job_killed_while_it_writes_goes_on_from_what_is_complete(tmp_path, options):
    options = EVERY_STEP | options
    kill_behind(3, tmp_path / "again", options)
    run_job(tmp_path / "again", **options)
    run_job(tmp_path / "whole", **options)
    assert_same_end(tmp_path / "whole", tmp_path / "again")
    assert list((tmp_path / "again").glob("*.partial")) == []


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.35, 0.5])
def test_a_job_killed_at_an_arbitrary_moment_ends_the_same(tmp_path, seconds):
    job = start_job(tmp_path / "again", EVERY_STEP)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "again" / "global_step_1.partial").exists() and job.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.005)
        time.sleep(seconds)
        job.kill()
        job.communicate(timeout=60)
    finally:
        health.kill([job.pid, *health.descendants([job.pid])])
    run_job(tmp_path / "again", **EVERY_STEP)
    run_job(tmp_path / "whole", **EVERY_STEP)
    assert_same_end(tmp_path / "whole", tmp_path / "again")
