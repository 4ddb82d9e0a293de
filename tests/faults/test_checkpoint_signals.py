"""SIGTERM and SIGINT on a real process: the step is finished and saved, the exit code says so, nothing lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hybridflow.single_controller import health
from hybridflow.trainer.checkpoint import CheckpointStore
from tests.faults.job import start_job
from tests.invariants.test_resume import lines
from tests.jobs import read_metrics, run_job

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {
    "trainer.total_training_steps": 40,
    "trainer.threads_per_worker": 1,  # as this process has: bits depend on it
    "trainer.save_freq": 1000,
    "actor_rollout_ref.actor.optim.lr": 1e-4,
}
SLOW: dict[str, Any] = LONG | {
    "reward.custom_reward_function.path": str(Path(__file__).with_name("slow_reward.py")),
    "trainer.n_gpus_per_node": 2,
}


def wait_until(claim: Any, job: subprocess.Popen[str], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not claim():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < until, "the job does not get there"
        time.sleep(0.02)


def without_bytes(folder: Path) -> list[dict[str, Any]]:
    """Metrics without what depends on how payloads travel: the Ray job is compared with one of this process."""
    travel = ("perf/driver_bytes", "perf/fetched_bytes", "perf/over_fetch_bytes")
    return [{name: value for name, value in row.items() if not name.startswith(travel)} for row in lines(folder)]


def lines_written(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, {}),
        (signal.SIGINT, {"trainer.n_gpus_per_node": 2}),
        pytest.param(signal.SIGTERM, {"trainer.controller": "ray"}, marks=pytest.mark.ray),
    ],
    ids=["SIGTERM", "SIGINT to two ranks", "SIGTERM with Ray"],
)
def test_a_signal_saves_after_the_step_and_the_run_goes_on_later(tmp_path, number, options):
    """SIGINT goes to the whole process group, as Ctrl-C does: two ranks must not die of it."""
    job = start_job(tmp_path / "again", LONG | options)
    try:
        wait_until(lambda: lines_written(tmp_path / "again") >= 3, job)
        started = health.descendants([job.pid])
        (os.killpg if number == signal.SIGINT else os.kill)(job.pid, number)
        output = job.communicate(timeout=60)[0]
        assert job.returncode == 128 + number, output
        assert "a second signal ends it at once" in output
        assert health.wait_gone(started, timeout_s=5.0) == []
    finally:
        health.kill([job.pid, *health.descendants([job.pid])])
    done = len(read_metrics(tmp_path / "again"))
    newest = CheckpointStore(tmp_path / "again").newest()
    assert newest is not None and newest.step == done < LONG["trainer.total_training_steps"]
    short = LONG | options | {"trainer.controller": "local", "trainer.total_training_steps": done + 2}
    run_job(tmp_path / "again", **short)
    run_job(tmp_path / "whole", **short)
    assert without_bytes(tmp_path / "again") == without_bytes(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_at_once_and_ends_every_process(tmp_path, number):
    """SIGINT to the whole group, as somebody does who presses Ctrl-C twice."""
    send = os.killpg if number == signal.SIGINT else os.kill
    marker = tmp_path / "scoring"
    job = start_job(tmp_path, SLOW | {"reward.custom_reward_function.reward_kwargs": {"marker": marker}})
    try:
        wait_until(marker.exists, job)  # the ranks score their first batch, which takes for ever
        started = health.descendants([job.pid])
        send(job.pid, number)
        time.sleep(1.0)
        assert job.poll() is None, "the first signal waits for the step"
        begun = time.monotonic()
        send(job.pid, number)
        job.communicate(timeout=20)
        assert time.monotonic() - begun < 5.0
        assert job.returncode == 128 + number
        assert health.wait_gone(started, timeout_s=5.0) == []
    finally:
        health.kill([job.pid, *health.descendants([job.pid])])


def test_a_signal_during_the_start_ends_what_has_started(tmp_path):
    job = start_job(tmp_path, SLOW)
    try:
        wait_until(lambda: (tmp_path / "resolved_config.yaml").exists(), job)
        time.sleep(0.3)
        started = health.descendants([job.pid])
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
        assert job.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
        assert health.wait_gone(started, timeout_s=5.0) == []
    finally:
        health.kill([job.pid, *health.descendants([job.pid])])
