"""Groups without Ray: in this process, and as forked processes."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hybridflow.dispatch.group import WorkerSpec
from hybridflow.single_controller import lanes
from hybridflow.single_controller.host import Rendezvous, Reply, open_store
from hybridflow.single_controller.lanes import GroupSettings
from hybridflow.single_controller.local_group import LocalGroup
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError, LostError, MachineError, WorkerError
from tests import ranks
from tests.unit.single_controller import contract
from tests.unit.single_controller.contract import SPECS, WORKERS, batch_of

assert ranks  # its preloads are the session's; preload=() leaves them alone


def open_pair(specs: Any = SPECS, **settings: Any) -> LocalGroup:
    return LocalGroup(2, specs, GroupSettings(collective_timeout_s=60, **settings), preload=())


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalGroup]:
    group = open_pair()
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalGroup]:
    group = LocalGroup(1, SPECS)
    yield group
    group.shutdown()


def test_results_are_those_of_one_rank(pair: LocalGroup, alone: LocalGroup) -> None:
    contract.results_are_those_of_one_rank(pair, alone)


@pytest.mark.parametrize(
    "sentence",
    [
        contract.only_the_columns_that_are_read_travel,
        contract.wide_results_stay_where_they_were_made,
        contract.what_the_driver_keeps_leaves_it_once,
        contract.a_call_in_flight_holds_what_it_reads,
        contract.calls_run_in_submission_order,
        contract.roles_of_one_group_share_processes_and_one_thread,
        contract.only_rank_zero_is_called_by_rank_zero,
        contract.the_control_lane_answers_while_the_work_lane_is_busy,
        contract.wrong_calls_are_refused_before_anything_is_sent,
        contract.an_exception_on_all_ranks_leaves_the_group_usable,
        contract.leaving_and_unpicklable_results_are_errors_too,
    ],
    ids=lambda function: function.__name__,
)
def test_contract(sentence: Any, pair: LocalGroup) -> None:
    sentence(pair)


@pytest.mark.parametrize(
    "sentence",
    [
        contract.one_failing_rank_is_named_though_its_peer_hangs,
        contract.rows_die_with_the_rank_that_made_them,
        contract.a_worker_that_cannot_be_built_is_named,
        contract.a_slow_start_passes_its_deadline,
    ],
    ids=lambda function: function.__name__,
)
def test_contract_of_failures(sentence: Any) -> None:
    sentence(open_pair)


def test_a_deadline_names_who_did_not_answer(tmp_path: Path) -> None:
    contract.a_deadline_names_who_did_not_answer_and_where_it_stands(open_pair, tmp_path)


def test_a_stalled_call_is_reported_before_its_deadline(caplog: Any) -> None:
    contract.a_stalled_call_is_reported_before_its_deadline_and_the_straggler_after_it(open_pair, caplog)


@pytest.mark.parametrize("jump_s", [1e6, -1e6])
def test_a_clock_that_jumps_moves_no_deadline(pair: LocalGroup, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """As when a machine without a battery learns the date: calls are timed by a clock that only runs."""
    now = time.time
    call = pair.call("echo", "doze", seconds=0.3)
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    call.wait()
    pair.call("echo", "first")
    assert 0.3 <= call.seconds < 60


@pytest.mark.parametrize("told_s", [-1e6, -1.0, 1e6])
def test_a_call_has_ended_between_its_earliest_end_and_now_whatever_the_ranks_clock_says(told_s: float) -> None:
    begun_at = time.monotonic() - 10.0
    call = lanes.Submission(1, "echo", "doze", [0], 60.0, None)
    call.replies, call.seconds = {0: Reply(at=time.time() + told_s)}, 2.0
    expected = {-1e6: begun_at + 2.0, -1.0: time.monotonic() - 1.0, 1e6: time.monotonic()}[told_s]
    assert abs(lanes._finished_at(call, begun_at) - expected) < 0.5


def test_workers_are_closed_at_shutdown(tmp_path: Path) -> None:
    contract.workers_are_closed_at_shutdown(open_pair, tmp_path)


def kept_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("hybridflow-kept-*")}


def test_rows_are_freed_with_the_last_batch_that_refers_to_them() -> None:
    before, group = kept_files(), open_pair()
    try:
        made = group.call("wide", "make", batch_of(8)).wait()
        assert len(kept_files() - before) == 2
        first = made.rows([0])
        del made
        gc.collect()
        assert len(kept_files() - before) == 1, "only the object of row 0 is needed"
        del first
        gc.collect()
        assert kept_files() <= before
        left = group.call("wide", "make", batch_of(8)).wait()
    finally:
        group.shutdown()
    assert kept_files() <= before, "a group that ends leaves nothing behind"
    with pytest.raises(WorkerError, match="rows are lost"):
        left["wide"]


def test_a_group_reads_what_another_group_made(pair: LocalGroup, alone: LocalGroup) -> None:
    made = pair.call("wide", "make", batch_of(5)).wait()
    assert alone.call("wide", "add_up", made).wait()["total"].tolist() == [0, 100, 200, 303, 404]
    other = open_pair()
    try:
        assert other.call("wide", "add_up", made).wait()["total"].tolist() == [0, 100, 200, 303, 404]
        of_the_dead = other.call("wide", "make", batch_of(5)).wait()
    finally:
        other.shutdown()
    with pytest.raises(LostError, match=r"rank . of 2 .*rows are lost: they were kept by rank . of 2"):
        pair.call("wide", "add_up", of_the_dead).wait()
    assert pair.call("wide", "add_up", made).wait()["total"].tolist() == [0, 100, 200, 303, 404], "it is well itself"


# ------------------------------------------------------------------------------------------------- one rank in process


def test_one_rank_hands_out_its_own_tensors(alone: LocalGroup) -> None:
    alone.bytes_moved()
    made = alone.call("wide", "make", batch_of(4)).wait()
    assert isinstance(made.columns()["wide"], torch.Tensor) and alone.keep(made) is made
    assert alone.bytes_moved() == 4 * 8 + 4 * 1 + 4 * 8, "x and valid out, maker back"


def test_one_rank_lives_in_the_calling_process_and_thread(alone: LocalGroup) -> None:
    (info,) = alone.call("echo", "whoami").wait()
    assert info["pid"] == os.getpid()
    assert info["same_thread"]
    assert info["world"] == 1


def test_one_rank_fails_and_counts_like_many(alone: LocalGroup) -> None:
    with pytest.raises(WorkerError, match="role 'echo', rank 0 of 1 .*: fail raised ConfigError"):
        alone.call("echo", "fail", rank=0).wait()
    alone.bytes_moved()
    alone.call("echo", "shift", batch_of(4)).wait()
    assert alone.bytes_moved() == 4 * 8 + 4 * 1 + 4 * 8, "x and valid out, y back"
    alone.post("hello")
    assert alone.call("echo", "drain").wait() == ["hello"]


def test_two_groups_of_one_rank_share_the_world_of_the_process(alone: LocalGroup) -> None:
    second = LocalGroup(1, SPECS)
    assert second.call("echo", "shift", batch_of(3)).wait()[1]["sum"] == 3
    second.shutdown()
    assert alone.call("echo", "shift", batch_of(3)).wait()[1]["sum"] == 3


def test_a_missing_environment_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        LocalGroup(1, SPECS, GroupSettings(environment={"HYBRIDFLOW_TEST_UNSET": "1"})).shutdown()
    assert "HYBRIDFLOW_TEST_UNSET" in caplog.text


# ------------------------------------------------------------------------------------------------ processes and ports


def test_ranks_get_their_environment_before_they_build(monkeypatch: pytest.MonkeyPatch) -> None:
    group = open_pair(environment={"FOO": "bar", "OMP_NUM_THREADS": "1"}, unset=("HF_HUB_OFFLINE",))
    try:
        names = ("FOO", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
        assert group.call("echo", "variables", *names).wait() == [["bar", None, "1"]] * 2
    finally:
        group.shutdown()


def test_shutdown_leaves_no_process(tmp_path: Path) -> None:
    group = open_pair()
    pids = [info["pid"] for info in group.call("echo", "whoami").wait()]
    group.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_large_arguments_do_not_block_the_caller() -> None:
    group = open_pair()
    try:
        group.wait_ready()
        dozing = group.call("echo", "doze", seconds=1.0)
        sent = threading.Event()

        def send() -> None:
            group.call("echo", "note", "x" * (8 << 20))
            sent.set()

        threading.Thread(target=send).start()
        assert sent.wait(0.9), "a full pipe made the caller wait for a busy rank"
        dozing.wait()
    finally:
        group.shutdown()


def test_the_next_port_is_tried_when_one_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, meeting = open_store("127.0.0.1", [port, 0], 5)
        assert meeting.port not in (0, port)
        with pytest.raises(MachineError, match=f"127.0.0.1:{port} .Address already in use"):
            open_store("127.0.0.1", [port], 5)


def test_two_groups_that_start_at_once_both_run() -> None:
    first, second = open_pair(), open_pair()
    try:
        assert first.call("echo", "shift", batch_of(3)).wait()[1]["sum"] == 3
        assert second.call("echo", "shift", batch_of(5)).wait()[1]["sum"] == 10
    finally:
        first.shutdown()
        second.shutdown()


def test_an_ipv6_address_is_written_with_brackets_and_served() -> None:
    assert str(Rendezvous(address="::1", port=5)) == "[::1]:5"
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    _, meeting = open_store("::1", [0], 5)
    assert meeting.port > 0


# ------------------------------------------------------------------------------------------------------- what is wrong


def test_groups_that_cannot_work_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="'echo' appears twice"):
        LocalGroup(2, [SPECS[0], SPECS[0]])
    with pytest.raises(ConfigError, match="no attribute 'Ecco'"):
        LocalGroup(2, [WorkerSpec(role="echo", target=f"{WORKERS}:Ecco")])
    with pytest.raises(ConfigError, match="no method with @register"):
        LocalGroup(2, [WorkerSpec(role="path", target="pathlib:Path")])
    with pytest.raises(ConfigError, match="made for 4 ranks, the group has 2"):
        layouts = {"train": ParallelDims(dp_shard=4)}
        LocalGroup(2, [WorkerSpec(role="echo", target=f"{WORKERS}:Echo", layouts=layouts)])


def test_a_layout_decides_who_gets_which_rows() -> None:
    layouts = {"train": ParallelDims(tp=2)}
    group = open_pair([WorkerSpec(role="rows", target=f"{WORKERS}:Rows", layouts=layouts)])
    try:
        seen = group.call("rows", "mine", batch_of(3)).wait()
        assert torch.equal(seen["x"], torch.arange(3))
        assert group.call("rows", "counts").wait() == [3, 3]
    finally:
        group.shutdown()
