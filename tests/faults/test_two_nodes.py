"""The main job over two Ray nodes: one is killed, or cut off, and the run notices, names it and goes on by itself."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybridflow.single_controller import health
from tests.faults.job import start_job, word
from tests.faults.nodes import Nodes, two_nodes
from tests.invariants.test_resume import lines
from tests.jobs import SMALL, run_job

pytestmark = pytest.mark.ray

NOTICED_S = 10.0
JOB: dict[str, Any] = {
    "trainer.total_training_steps": 6,
    "trainer.save_freq": 1,
    "trainer.threads_per_worker": 1,
    "actor_rollout_ref.actor.optim.lr": 1e-4,
}
OVER_TWO: dict[str, Any] = JOB | {
    "trainer.controller": "ray",
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 1,
    "trainer.max_restarts": 8,
    "trainer.restart_backoff_s": 1.0,
    "actor_rollout_ref.nccl_timeout": 300,  # far beyond 10 s: it must not be what notices
}
ON_ONE: dict[str, Any] = JOB | {"trainer.n_gpus_per_node": 2}


class Job:
    """The job as a process whose output is read as it comes."""

    def __init__(self, folder: Path, nodes: Nodes, **options: Any) -> None:
        self.folder = folder
        self.text = ""
        chosen = OVER_TWO | {"ray_kwargs.ray_init.address": nodes.address} | options
        self._output = folder.with_suffix(".txt")
        with self._output.open("w") as output:
            self.process = start_job(folder, chosen, enter=nodes.enter("head"), environment=nodes.token, output=output)

    def wait_for(self, pattern: str, *, seconds: float = 240.0) -> float:
        """Seconds until the output contains ``pattern``."""
        begun = time.monotonic()
        while not re.search(pattern, self.text):
            self._read()
            assert self.process.poll() is None, self.text
            assert time.monotonic() - begun < seconds, f"{pattern!r} does not come:\n{self.text}"
            time.sleep(0.05)
        return time.monotonic() - begun

    def wait_for_steps(self, count: int) -> None:
        """Until ``metrics.jsonl`` has ``count`` lines."""
        path = self.folder / "metrics.jsonl"
        until = time.monotonic() + 240.0
        while not path.exists() or path.read_bytes().count(b"\n") < count:
            self._read()
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until, self.text
            time.sleep(0.02)

    def finish(self) -> None:
        until = time.monotonic() + 240.0
        while self.process.poll() is None:
            self._read()
            assert time.monotonic() < until, self.text
            time.sleep(0.1)
        self._read()
        assert self.process.returncode == 0, self.text

    def end(self) -> None:
        health.kill([self.process.pid, *health.descendants([self.process.pid])])

    def _read(self) -> None:
        self.text = self._output.read_text()


def assert_same_as_on_one(folder: Path, tmp_path: Path) -> None:
    """Every line of metrics but times and bytes, which travel otherwise."""
    run_job(tmp_path / "whole", **ON_ONE)
    whole, again = (
        [{name: value for name, value in row.items() if not name.startswith(("perf/", "publish/"))} for row in rows]
        for rows in (lines(tmp_path / "whole"), lines(folder))
    )
    assert again == whole


def test_a_node_that_is_killed_is_noticed_named_and_the_run_goes_on_when_it_is_back(tmp_path):
    with two_nodes(tmp_path) as nodes:
        job = Job(tmp_path / "run", nodes)
        try:
            job.wait_for_steps(2)
            nodes.kill("worker")
            seconds = job.wait_for(r"rank [01] of 2 \(node \S+, pid \d+\) .*died")
            assert seconds < NOTICED_S, job.text
            job.wait_for(r"restart 2 of 8")  # one slot is missing: waited for, not given up
            nodes.start("worker")
            job.finish()
        finally:
            job.end()
    assert_same_as_on_one(tmp_path / "run", tmp_path)


@pytest.fixture
def link() -> Iterator[tuple[list[list[str]], str, list[str], list[str]]]:
    """Two network namespaces with one cable: (words that enter each, address of the first, cut, mend)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    one, two = (f"hf{os.getpid()}{letter}" for letter in "ab")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", one)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", two)
        ip("link", "add", f"{one}v", "netns", one, "type", "veth", "peer", "name", f"{two}v", "netns", two)
        for number, name in enumerate((one, two), start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"{name}v")
            ip("-n", name, "link", "set", f"{name}v", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "route", "add", "default", "dev", f"{name}v")
        device = ["ip", "-n", one, "link", "set", f"{one}v"]
        yield [["ip", "netns", "exec", name] for name in (one, two)], "10.77.0.1", [*device, "down"], [*device, "up"]
    finally:
        for name in (one, two):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_noticed_and_the_run_goes_on_when_it_is_back(tmp_path, link):
    """Nothing is killed: packets stop, no connection is closed, a collective would wait for minutes."""
    enter, host, cut, mend = link
    with two_nodes(tmp_path, enter=enter, host=host) as nodes:
        job = Job(tmp_path / "run", nodes)
        try:
            job.wait_for_steps(2)
            subprocess.run(cut, check=True)
            seconds = job.wait_for(r"rank [01] of 2 \(node \S+, pid \d+\) ")
            assert seconds < NOTICED_S, job.text
            job.wait_for("restart 1 of 8")
            nodes.kill("worker")
            subprocess.run(mend, check=True)
            nodes.start("worker")
            job.finish()
        finally:
            job.end()
    assert_same_as_on_one(tmp_path / "run", tmp_path)


@pytest.mark.slow
def test_sigterm_ends_the_job_and_leaves_the_cluster_usable(tmp_path):
    with two_nodes(tmp_path) as nodes:
        for steps in (3, 6):
            job = Job(tmp_path / "run", nodes, **{"trainer.total_training_steps": steps})
            try:
                if steps == 3:
                    job.wait_for_steps(1)
                    os.kill(job.process.pid, signal.SIGTERM)
                    job.process.wait(60)
                    assert job.process.returncode == 128 + signal.SIGTERM
                else:
                    job.finish()
            finally:
                job.end()


@pytest.mark.slow
def test_a_job_that_is_submitted_runs_on_the_cluster_it_was_submitted_to(tmp_path):
    """``ray job submit``: the driver starts on the head node and finds the cluster by itself."""
    with two_nodes(tmp_path, dashboard=True) as nodes:
        words = [f"{key}={word(value)}" for key, value in (SMALL | OVER_TWO).items()]
        python = Path(sys.executable)
        submit = [str(python.with_name("ray")), "job", "submit", "--", str(python), "-m", "hybridflow.main_ppo"]
        environment = os.environ | nodes.token | {"RAY_ADDRESS": f"http://127.0.0.1:{nodes.dashboard_port}"}
        done = subprocess.run(
            [*submit, *words, f"trainer.default_local_dir={tmp_path / 'run'}"],
            capture_output=True, text=True, timeout=240, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert_same_as_on_one(tmp_path / "run", tmp_path)


FAR = "far-node"


@pytest.fixture
def far() -> list[str]:
    """Words that run a command under another host name, as on another machine."""
    words = ["unshare", "--uts", "bash", "-c", f'hostname {FAR} && exec "$@"', FAR]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no host name of its own can be had here")
    return words


def said_of_far_rank(nodes: Nodes, *trouble: str) -> str:
    command = [sys.executable, "-m", "tests.faults.far_rank", nodes.address, FAR, *trouble]
    environment = os.environ | nodes.token
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_last_lines_of_a_rank_that_crashed_on_another_node_are_fetched_from_there(tmp_path, far):
    with two_nodes(tmp_path, enter=[[], far]) as nodes:
        said = said_of_far_rank(nodes, "crash")
    assert re.search(rf"rank [01] of 2 \(node {FAR}, pid \d+\) .*died during echo.crash: Fatal Python error: Seg", said)
    assert re.search(r"--- rank [01], last lines of its log ---(.|\n)*in crash", said), said


@pytest.mark.slow
def test_a_rank_that_rays_memory_monitor_ends_is_told_so(tmp_path, far):
    """The monitor of its node acts above a share of memory that the rank then takes."""
    memory = psutil.virtual_memory()
    threshold = 1 - memory.available / memory.total + 0.08
    variables = {"RAY_memory_usage_threshold": f"{threshold:.3f}", "RAY_memory_monitor_refresh_ms": "100"}
    with two_nodes(tmp_path, enter=[[], far], of_worker=variables) as nodes:
        said = said_of_far_rank(nodes, "hog", str(int(0.2 * memory.total / 4)))
    assert re.search(rf"rank [01] of 2 \(node {FAR}, pid \d+\) .*died during echo.hog: Ray's memory monitor", said), (
        said
    )
