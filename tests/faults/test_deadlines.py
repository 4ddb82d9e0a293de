"""Every wait of a run passes its deadline once: the error names phase, role and ranks, and all stacks are kept.

    wait                            deadline                            here
    call on a worker (Ray, local)   trainer.timeouts.* by phase         generation, weights, checkpoint, scoring
    collective                      actor_rollout_ref.nccl_timeout      late, stopped, or never out of an update's loss
    engine step of several ranks    the same (engines/rollout/lockstep) a rank of a vLLM engine that stops stepping
    reward call                     reward.timeout_s                    tests/unit/rewards/test_runner.py
    driver's part of a checkpoint   trainer.timeouts.save_s             a file system that does not come back
    start of Ray                    trainer.timeouts.start_s            an address where nobody answers
    reading of prompts              trainer.timeouts.data_s             a data set that does not come
    lock between waiting threads    that of the call that holds it      two threads that wait for one group

Prompts are read once, before the first step; from then on they come out of the driver's memory.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from hybridflow.batch.batch import Batch
from hybridflow.launch import specs
from hybridflow.single_controller import health, lanes
from hybridflow.single_controller.lanes import GroupSettings
from hybridflow.single_controller.local_group import LocalGroup
from hybridflow.utils.errors import DeadlineError, WorkerError
from tests import ranks
from tests.faults import stopping
from tests.faults.job import start_job
from tests.jobs import run_job
from tests.unit.single_controller.contract import SPECS

assert ranks  # the session's preloads
SLOW_REWARD = str(Path(__file__).with_name("slow_reward.py"))
STOPPING_LOSS = f"{stopping.__name__}:{stopping.loss_of_a_rank_that_stops.__name__}"
TWO: dict[str, Any] = {"trainer.n_gpus_per_node": 2, "trainer.total_training_steps": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"trainer.timeouts.generate_s": 0.02},
            r"role 'rollout': generate_sequences passed its deadline of 0.02 s; no answer from rank",
        ),
        ({"trainer.timeouts.publish_s": 0.001}, r"role 'weights': publish passed its deadline of 0.001 s"),
        pytest.param(
            {"trainer.timeouts.save_s": 0.001, "trainer.save_freq": 1},
            r"role 'actor': save_checkpoint passed its deadline of 0.001 s",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "trainer.timeouts.reward_s": 3.0,
                "reward.timeout_s": 600,
                "reward.custom_reward_function.path": SLOW_REWARD,
            },
            r"role 'reward': compute_reward passed its deadline of 3 s",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"trainer.timeouts.train_s": 3.0, "actor_rollout_ref.actor.policy_loss.loss_mode": STOPPING_LOSS},
            r"role 'actor': update_actor passed its deadline of 3 s; no answer from rank 0 of 2 .*, rank 1 of 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"trainer.timeouts.start_s": 0.05}, r"start passed its deadline of 0.05 s", marks=pytest.mark.slow
        ),
    ],
    ids=["generate_s", "publish_s", "save_s", "reward_s", "train_s", "start_s"],
)
def test_a_phase_that_takes_longer_than_its_deadline_ends_the_run(tmp_path, options, message):
    with pytest.raises(DeadlineError, match=message) as got:
        run_job(tmp_path, **TWO, **options)
    kept = sorted(path.name for path in (tmp_path / "stacks").iterdir())
    assert "stacks_driver.txt" in kept
    assert str(tmp_path / "stacks") in str(got.value)
    if "start" not in message:
        assert {"stacks_main_rank0.txt", "stacks_main_rank1.txt"} <= {*kept}, "every worker, not only who is late"


def test_a_rank_that_does_not_come_to_a_collective_is_named_when_its_deadline_passes(tmp_path):
    group = LocalGroup(
        2, SPECS, GroupSettings(name="local", collective_timeout_s=2.0, stack_folder=tmp_path), preload=()
    )
    try:
        group.wait_ready()
        begun = time.monotonic()
        with pytest.raises(DeadlineError) as got:
            group.call("echo", "meet", late=1, seconds=60.0).wait()
        assert time.monotonic() - begun < 10
        text = str(got.value)
        assert "role 'echo', rank 0 of 2" in text and "meet raised" in text and "did not answer: rank 1 of 2" in text
        assert group.first_loss() == text and group.first_death() is None, "a replica of a generator would be replaced"
        assert "in meet" in (tmp_path / "stacks_local_rank1.txt").read_text()
        assert (tmp_path / "stacks_local_rank0.txt").exists() and (tmp_path / "stacks_driver.txt").exists()
    finally:
        group.shutdown()


def assert_stopped_rank_is_named(folder: Path, said: str, *, role: str, method: str, stands_in: str) -> None:
    """Who arrived, who did not, and the stacks of both in the run's folder."""
    assert f"role {role!r}, rank 0 of 2 (node {os.uname().nodename}, pid " in said and f"{method} raised" in said
    assert "did not answer: rank 1 of 2 (node" in said
    assert f"in {stands_in}" in (folder / "stacks" / "stacks_main_rank1.txt").read_text()
    assert {path.name for path in (folder / "stacks").iterdir()} >= {"stacks_main_rank0.txt", "stacks_driver.txt"}


def test_a_rank_that_stops_before_a_reduction_of_an_update_is_named_when_nccl_timeout_has_passed(tmp_path):
    """The groups of a mesh have the deadline too, not only the world (torch gives them half an hour)."""
    mode = {"actor_rollout_ref.actor.policy_loss.loss_mode": STOPPING_LOSS}
    begun = time.monotonic()
    with pytest.raises(DeadlineError) as got:
        run_job(tmp_path, **TWO | mode | {"actor_rollout_ref.nccl_timeout": 4})
    assert time.monotonic() - begun < 40
    assert_stopped_rank_is_named(
        tmp_path, str(got.value), role="actor", method="update_actor", stands_in="loss_of_a_rank_that_stops"
    )


@pytest.mark.vllm
def test_a_rank_of_a_generator_that_stops_stepping_is_named_when_nccl_timeout_has_passed(tmp_path, monkeypatch):
    monkeypatch.setitem(specs.WORKERS, "rollout", f"{stopping.__name__}:{stopping.StoppingRollout.__name__}")
    options = TWO | {
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.nccl_timeout": 10,
    }
    with pytest.raises(DeadlineError) as got:
        run_job(tmp_path, **options)
    said = str(got.value)
    assert "tensor-parallel ranks [0, 1]: no common step within 10 s" in said
    assert_stopped_rank_is_named(
        tmp_path, said, role="rollout", method="generate_sequences", stands_in="_between_steps"
    )


def test_prompts_that_are_not_read_within_data_s_are_named(tmp_path):
    rows = stopping.rows_that_do_not_come
    options = {
        "data.custom_cls.path": stopping.__file__,
        "data.custom_cls.name": rows.__name__,
        "data.train_files": ["far.away"],
        "trainer.timeouts.data_s": 1.5,
    }
    with pytest.raises(DeadlineError, match=r"not read and encoded its prompts after 1.5 s .*data_s\): far.away"):
        run_job(tmp_path, **options)
    assert f"in {rows.__name__}" in (tmp_path / "stacks" / "stacks_driver.txt").read_text()


def test_a_rank_in_native_code_that_holds_the_interpreter_still_shows_its_stack(tmp_path):
    settings = GroupSettings(name="local", deadlines={"hold_interpreter": 1.0}, stack_folder=tmp_path)
    group = LocalGroup(2, SPECS, settings, preload=())
    try:
        pids = [info["pid"] for info in group.call("echo", "whoami").wait()]
        with pytest.raises(DeadlineError, match=r"no answer from rank 1 of 2 (.|\n)*in hold_interpreter"):
            group.call("echo", "hold_interpreter", rank=1).wait()
        assert "in hold_interpreter" in (tmp_path / "stacks_local_rank1.txt").read_text()
    finally:
        group.shutdown()
    assert not any(list(Path("/dev/shm").glob(f"hybridflow-stacks-*-{pid}")) for pid in pids)


@pytest.mark.slow
def test_a_stopped_process_ends_the_run_when_its_peer_or_the_driver_has_waited_long_enough(tmp_path):
    """SIGSTOP: a process that neither works nor dies, as on a node that swaps or a GPU that hangs."""
    options = {
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": 400,
        "actor_rollout_ref.nccl_timeout": 4,
        **{f"trainer.timeouts.{phase}_s": 10.0 for phase in ("generate", "train", "reward", "publish")},
        "actor_rollout_ref.actor.optim.lr": 1e-5,
    }
    job = start_job(tmp_path, options)
    try:
        until = time.monotonic() + 120
        metrics = tmp_path / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.05)
        stopped = [pid for pid in health.descendants([job.pid]) if _threads(pid) > 3][-1]
        os.kill(stopped, signal.SIGSTOP)
        output = job.communicate(timeout=60)[0]
        assert job.returncode == 4, output
        assert f"pid {stopped}" in output and ("did not answer" in output or "no answer from" in output)
        assert (tmp_path / "stacks" / "stacks_driver.txt").exists()
    finally:
        health.kill([job.pid, *health.descendants([job.pid])])


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


class StuckFileSystem(MemoryFileSystem):
    """Takes no file until it is told to."""

    protocol = "stuck"
    released = threading.Event()

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        self.released.wait(60.0)


@pytest.fixture
def stuck() -> Iterator[str]:
    fsspec.register_implementation("stuck", StuckFileSystem, clobber=True)
    StuckFileSystem.released.clear()
    yield "stuck://bucket/run"
    StuckFileSystem.released.set()


def test_a_checkpoint_whose_disk_does_not_come_back_ends_the_run(tmp_path, stuck):
    options = {"trainer.save_freq": 1, "trainer.checkpoint_copy": stuck, "trainer.timeouts.save_s": 2.0}
    with pytest.raises(DeadlineError, match=r"checkpoint of step 1 .* was not complete within 2 s .*save_s"):
        run_job(tmp_path, **options)


def test_a_deadline_is_told_though_the_disk_takes_no_stacks(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    group = LocalGroup(
        2, SPECS, GroupSettings(deadlines={"doze": 0.5}, stack_folder=tmp_path / "file" / "stacks"), preload=()
    )
    try:
        group.wait_ready()
        with pytest.raises(DeadlineError, match="doze passed its deadline of 0.5 s"):
            group.call("echo", "doze", seconds=60.0).wait()
        assert "stacks cannot be written to" in caplog.text
    finally:
        group.shutdown()


def test_a_stopped_rank_passes_its_deadline_though_it_reads_nothing_of_a_large_call(monkeypatch):
    """What is sent fills its pipe: the driver must not stand in the write."""
    monkeypatch.setattr(lanes, "STACKS_TIMEOUT_S", 0.3)
    monkeypatch.setattr(lanes, "STACKS_S", 0.3)
    group = LocalGroup(2, SPECS, GroupSettings(deadlines={"shift": 1.0}), preload=())
    try:
        pids = [info["pid"] for info in group.call("echo", "whoami").wait()]
        os.kill(pids[1], signal.SIGSTOP)
        begun = time.monotonic()
        call = group.call("echo", "shift", Batch({"x": torch.zeros(1 << 20, dtype=torch.int64)}))
        with pytest.raises(DeadlineError, match=r"shift (raised|passed its deadline)(.|\n)*rank 1 of 2"):
            call.wait()
        assert time.monotonic() - begun < 15.0
        assert group.first_loss() is not None and group.first_death() is None
    finally:
        group.shutdown()
    assert health.wait_gone(pids, timeout_s=0.0) == []


def test_two_threads_that_wait_for_one_group_are_both_freed_by_the_deadline_of_the_first_call():
    group = LocalGroup(2, SPECS, GroupSettings(deadlines={"doze": 1.5}), preload=())
    errors: list[str] = []

    def wait(call: Any) -> None:
        try:
            call.wait()
        except (DeadlineError, WorkerError) as error:
            errors.append(str(error))

    try:
        group.wait_ready()
        calls = [group.call("echo", "doze", seconds=60.0), group.call("echo", "whoami")]
        threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15.0)
        assert not any(thread.is_alive() for thread in threads)
        assert any("doze passed its deadline of 1.5 s" in error for error in errors)
        assert any("whoami was not run, because" in error for error in errors)
    finally:
        group.shutdown()


@pytest.mark.ray
def test_a_cluster_that_does_not_answer_is_given_up_after_start_s(tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing: Ray asks for a minute
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    options = {
        "trainer.controller": "ray",
        "trainer.timeouts.start_s": 2.0,
        "ray_kwargs.ray_init": {"address": address},
    }
    job = start_job(tmp_path, options)
    try:
        begun = time.monotonic()
        output = job.communicate(timeout=60)[0]
        assert job.returncode == 4, output
        assert f"Ray on {address} was not there within 2 s (trainer.timeouts.start_s)" in output
        assert time.monotonic() - begun < 40
    finally:
        listener.close()
        health.kill([job.pid, *health.descendants([job.pid])])
