"""kill -9 on a rank, at any moment: noticed within 10 s, named, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybridflow.dispatch.group import WorkerSpec
from hybridflow.single_controller import health
from hybridflow.single_controller.cluster import Cluster
from hybridflow.single_controller.lanes import GroupSettings, LaneGroup
from hybridflow.single_controller.local_group import LocalGroup
from hybridflow.single_controller.ray_group import RayGroup
from hybridflow.single_controller.resource_pool import ResourcePool
from hybridflow.single_controller.segments import remove_segments_of_the_dead, segments_of
from hybridflow.utils.errors import LostError, WorkerError
from tests import ranks
from tests.unit.single_controller.contract import SPECS, WORKERS

assert ranks  # the session's preloads
NOTICED_S = 10.0


def pids_of(group: LaneGroup) -> list[int]:
    return [info["pid"] for info in group.call("echo", "whoami").wait()]


def kill_later(pid: int, seconds: float) -> None:
    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()


def noticed(group: LaneGroup, pid: int, *, method: str) -> str:
    """The error of a call during which ``pid`` is killed."""
    pending = group.call("echo", method, seconds=60.0)
    kill_later(pid, 0.3)
    begun = time.monotonic()
    with pytest.raises(WorkerError) as got:
        pending.wait()
    assert time.monotonic() - begun < NOTICED_S
    return str(got.value)


def assert_killed_rank_is_named(group: LaneGroup) -> None:
    """During a call, and the group is of no use afterwards."""
    pids = pids_of(group)
    segment = Path("/dev/shm") / f"torch_{pids[1]}_left_behind"
    segment.write_bytes(b"x")
    foreign = Path("/dev/shm") / "hybridflow_test_of_somebody_else"
    foreign.write_bytes(b"x")
    try:
        text = noticed(group, pids[1], method="doze")
        assert f"rank 1 of 2 (node {os.uname().nodename}, pid {pids[1]})" in text
        assert "died during echo.doze" in text
        assert "killed by SIGKILL from outside" in text
        with pytest.raises(WorkerError, match="cannot go on after"):
            group.call("echo", "whoami")
        begun = time.monotonic()
        group.shutdown()
        assert time.monotonic() - begun < NOTICED_S, "a rank that dozes on is not waited for"
        assert health.wait_gone(pids, timeout_s=1.0) == []
        assert not segment.exists()
        assert foreign.exists(), "only what the ranks left is removed"
    finally:
        group.shutdown()
        segment.unlink(missing_ok=True)
        foreign.unlink()


def test_a_killed_local_rank_is_named() -> None:
    assert_killed_rank_is_named(LocalGroup(2, SPECS, preload=()))


def test_the_dead_rank_is_blamed_not_the_peer_that_lost_its_connection() -> None:
    group = LocalGroup(2, SPECS, preload=())
    try:
        with pytest.raises(WorkerError, match=r"(?s)^rank 1 of 2 .*died during echo.kill_self.*rank 0 .RuntimeError"):
            group.call("echo", "kill_self", rank=1).wait()
    finally:
        group.shutdown()


@pytest.fixture
def narrow_cgroup() -> Iterator[Path]:
    """A cgroup of 256 MiB, where this user may make one."""
    entry = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "0::/")
    version_2 = entry.startswith("0::")
    place = Path("/sys/fs/cgroup") / ("" if version_2 else "memory") / entry.split(":", 2)[2].lstrip("/")
    folder = place / f"hybridflow_test_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(256 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield folder
    folder.rmdir()


def test_the_out_of_memory_killer_is_told_apart_from_kill_9(narrow_cgroup: Path) -> None:
    """The kernel really ends a rank whose cgroup is too small; the driver's own cgroup counts only its own victims."""
    group = LocalGroup(2, SPECS, preload=())
    try:
        with pytest.raises(LostError, match="while the kernel's out-of-memory killer ended processes of this node"):
            group.call("echo", "hog", rank=1, cgroup=str(narrow_cgroup)).wait()
    finally:
        group.shutdown()


def test_a_crash_names_its_signal() -> None:
    group = LocalGroup(2, SPECS, preload=())
    try:
        with pytest.raises(LostError, match=r"rank 1 of 2 .*died during echo.crash: killed by SIGSEGV"):
            group.call("echo", "crash", rank=1).wait()
    finally:
        group.shutdown()


def test_a_rank_that_dies_between_calls_is_named_by_the_next() -> None:
    group = LocalGroup(2, SPECS, preload=())
    try:
        pid = pids_of(group)[0]
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        with pytest.raises(WorkerError, match=f"rank 0 of 2 .*pid {pid}.* died"):
            group.call("echo", "note", "x").wait()
    finally:
        group.shutdown()


def test_a_rank_that_dies_while_it_is_built_is_named() -> None:
    group = LocalGroup(2, [WorkerSpec(role="slow", target=f"{WORKERS}:Slow", kwargs={"seconds": 60.0})], preload=())
    try:
        place = group.who(1)
        kill_later(int(place.rpartition("pid ")[2].rstrip(")")), 1.0)
        begun = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 of 2 .*died during .*start"):
            group.wait_ready()
        assert time.monotonic() - begun < NOTICED_S + 1
    finally:
        group.shutdown()


def test_a_wait_on_one_group_notices_a_death_in_another() -> None:
    waiting, dying = (LocalGroup(2, SPECS, GroupSettings(name=name), preload=()) for name in ("waiting", "dying"))
    try:
        kill_later(pids_of(dying)[0], 0.5)
        begun = time.monotonic()
        with pytest.raises(WorkerError, match=r"echo.doze given up, because rank 0 of 2 .* of group 'dying'"):
            waiting.call("echo", "doze", seconds=60.0).wait()
        assert time.monotonic() - begun < NOTICED_S
    finally:
        waiting.shutdown()
        dying.shutdown()


@pytest.fixture
def ray_pair(cluster: Cluster) -> Iterator[RayGroup]:
    pool = ResourcePool([2])
    group = RayGroup(pool, SPECS)
    group.wait_ready()  # or a death is one during the start, of which a rank's answer may still be on its way
    yield group
    group.shutdown()
    pool.release()


@pytest.mark.ray
def test_a_killed_ray_rank_is_named(ray_pair: RayGroup) -> None:
    assert_killed_rank_is_named(ray_pair)


@pytest.mark.ray
def test_a_ray_rank_that_dies_between_calls_is_named(ray_pair: RayGroup) -> None:
    pid = pids_of(ray_pair)[0]
    os.kill(pid, signal.SIGKILL)
    beside = LocalGroup(1, SPECS)
    begun = time.monotonic()
    while (text := ray_pair.first_death()) is None and time.monotonic() - begun < NOTICED_S:
        time.sleep(0.1)
    beside.shutdown()
    assert text is not None
    assert f"rank 0 of 2 (node {os.uname().nodename}, pid {pid})" in text
    with pytest.raises(WorkerError, match=f"pid {pid}.* died"):
        ray_pair.call("echo", "note", "x").wait()


@pytest.mark.ray
def test_a_crash_of_a_ray_rank_shows_the_fatal_error_of_its_log(ray_pair: RayGroup) -> None:
    with pytest.raises(LostError, match=r"(?s)died during echo.crash: Fatal Python error: Seg.*last lines of its log"):
        ray_pair.call("echo", "crash", rank=1).wait()


@pytest.mark.parametrize("trouble", ["raise", "die", "die with a rank"])
@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_no_process_and_no_row_outlives_its_driver(kind: str, trouble: str, tmp_path: Path) -> None:
    """An exception that nobody catches, or kill -9 on the driver itself, alone or at once with one of its ranks.

    After a kill -9 two agents of Ray's own (2.60) look for their cluster for another minute; they are not waited for.
    """
    command = [sys.executable, "-m", "tests.faults.driver", kind, trouble.split()[0], str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    everyone, agents = [], []
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        pids = _wait_for_pids(tmp_path / "pids", driver)
        started = health.descendants([driver.pid])
        agents = [pid for pid in started if _is_agent_of_ray(pid)]
        everyone = [pid for pid in started if pid not in agents]
        assert kind == "ray" or all(segments_of([pid]) for pid in (driver.pid, *pids)), "rows are kept by all three"
        if trouble != "raise":
            driver.kill()
        if trouble == "die with a rank":
            os.kill(pids[1], signal.SIGKILL)
        _, errors = driver.communicate(timeout=60)
        assert driver.returncode != 0
        if trouble == "raise":
            assert "ConfigError: this rank was told to fail" in errors, "the first real traceback is shown"
        assert health.wait_gone([*pids, *everyone], timeout_s=20.0) == []
        assert segments_of([driver.pid, *everyone]) == []
    finally:
        health.kill([driver.pid, *everyone, *agents])


def test_what_a_tree_of_processes_kept_goes_with_the_next_group_when_all_died_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.driver", "local", "die", str(tmp_path)]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    everyone = [driver.pid]
    try:
        _wait_for_pids(tmp_path / "pids", driver)
        everyone += health.descendants([driver.pid])
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)  # so that nobody cleans up behind another
    finally:
        health.kill(everyone)
        driver.communicate()
    assert len(segments_of(everyone)) == 3
    remove_segments_of_the_dead()  # as every LocalGroup does first
    assert segments_of(everyone) == []


def _is_agent_of_ray(pid: int) -> bool:
    return "Agent" in " ".join(psutil.Process(pid).cmdline())


def _wait_for_pids(path: Path, driver: subprocess.Popen[str]) -> list[int]:
    until = time.monotonic() + 120
    while not path.exists():
        assert driver.poll() is None, driver.communicate()[1]
        assert time.monotonic() < until, "the driver's ranks do not start"
        time.sleep(0.1)
    return [int(pid) for pid in path.read_text().split()]
