"""What every worker group must do, whatever hosts its ranks: one function per sentence, run on local and Ray groups."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import gather
from hybridflow.dispatch.group import Beats, WorkerSpec
from hybridflow.single_controller.lanes import LaneGroup
from hybridflow.utils.errors import ColumnError, ConfigError, DeadlineError, LostError, StateError, WorkerError

WORKERS = "tests.unit.single_controller.workers"
SPECS = (
    WorkerSpec(role="echo", target=f"{WORKERS}:Echo"),
    WorkerSpec(role="sibling", target=f"{WORKERS}:Sibling"),
    WorkerSpec(role="wide", target=f"{WORKERS}:Wide"),
)
Open = Callable[..., LaneGroup]
"""Opens a group of two ranks: (specs, **settings)."""


def batch_of(rows: int) -> Batch:
    return Batch({"x": torch.arange(rows), "unread": torch.zeros(rows, 1000)})


def results_are_those_of_one_rank(group: LaneGroup, alone: LaneGroup) -> None:
    for rows in (0, 1, 2, 3, 5, 8):
        (got, metrics), (expected, expected_metrics) = gather(
            group.call("echo", "shift", batch_of(rows), by=10), alone.call("echo", "shift", batch_of(rows), by=10)
        )
        assert torch.equal(got["y"], expected["y"])
        assert metrics["sum"] == expected_metrics["sum"], "pads entered a sum over ranks"


def only_the_columns_that_are_read_travel(group: LaneGroup) -> None:
    group.bytes_moved()
    group.call("echo", "shift", batch_of(8)).wait()
    assert 2 * 8 * 8 <= group.bytes_moved() < 8 * 1000 * 4
    assert group.bytes_moved() == 0


def wide_results_stay_where_they_were_made(group: LaneGroup) -> None:
    """Rows of ``wide`` are 100 or 101 numbers of 8 bytes; with ``other`` 64 rows are 100 KiB."""
    group.bytes_moved(), group.bytes_fetched()
    batch = Batch({"x": torch.arange(64)})
    made = group.call("wide", "make", batch).wait()
    assert made["maker"].tolist() == [0] * 32 + [1] * 32
    sums = group.call("wide", "add_up", made).wait()["total"]
    assert torch.equal(sums, torch.arange(64) * torch.tensor([100] * 32 + [101] * 32))
    assert group.bytes_moved() < 64 * 100, "wide columns went through the driver"
    fetched = group.bytes_fetched()
    assert fetched.beyond == 64 * 100 * 8 + 32 * 8, "of two columns in one object only one was read"
    assert fetched.all == fetched.beyond + 32 * (100 + 101) * 8

    order = torch.arange(63, -1, -2)  # rows of the other rank first, half of them
    assert torch.equal(group.call("wide", "add_up", made.rows(order)).wait()["total"], sums[order])
    for rows in (1, 3):  # a pad is cut off, and rows are on one rank only
        assert torch.equal(group.call("wide", "add_up", made.rows(slice(0, rows))).wait()["total"], sums[:rows])
    group.bytes_moved()
    assert made["wide"].shape == (64, 101) and torch.equal(made["wide"].sum(1), sums)
    assert group.bytes_moved() >= 2 * 64 * 100 * 8, "what the driver reads is counted"


def what_the_driver_keeps_leaves_it_once(group: LaneGroup) -> None:
    group.bytes_moved()
    kept = group.keep(Batch({"wide": torch.ones(64, 100, dtype=torch.long)}))
    for _ in range(3):
        assert group.call("wide", "add_up", kept.repeat(2)).wait()["total"].tolist() == [100] * 128
    assert 64 * 100 * 8 <= group.bytes_moved() < 64 * 100 * 8 + 3 * 128 * 100


def a_call_in_flight_holds_what_it_reads(group: LaneGroup) -> None:
    made = group.call("wide", "make", Batch({"x": torch.arange(4)})).wait()
    group.call("echo", "doze", seconds=0.3)
    pending = group.call("wide", "add_up", made)
    del made
    gc.collect()
    assert pending.wait()["total"].tolist() == [0, 100, 202, 303]


def rows_die_with_the_rank_that_made_them(open_group: Open) -> None:
    group = open_group(SPECS)
    try:
        made = group.call("wide", "make", Batch({"x": torch.arange(4)})).wait()
        with pytest.raises(WorkerError, match="died"):
            group.call("wide", "kill_self", rank=1).wait()
        with pytest.raises(LostError, match=r"rows are lost: they were kept by rank 1 of 2 \(roles echo, .*pid \d+"):
            made.rows([3])["wide"]
        with pytest.raises(WorkerError, match="cannot go on after"):
            group.call("wide", "add_up", made)
    finally:
        group.shutdown()


def calls_run_in_submission_order(group: LaneGroup) -> None:
    begun = time.monotonic()
    slow = group.call("echo", "note", "slow", seconds=0.5)
    fast = group.call("echo", "note", "fast")
    assert time.monotonic() - begun < 0.4, "a call returned only when it had run"
    for history in fast.wait():
        assert history[-2:] == ["slow", "fast"]
    for history in slow.wait():
        assert history[-1] == "slow"
    assert fast.wait() is fast.wait(), "waiting twice is allowed"


def roles_of_one_group_share_processes_and_one_thread(group: LaneGroup) -> None:
    infos = group.call("echo", "whoami").wait()
    assert [info["rank"] for info in infos] == [0, 1]
    assert len({info["pid"] for info in infos}) == 2
    assert all(info["same_thread"] and info["world"] == 2 for info in infos)
    assert all(info["siblings"] == ["echo", "sibling", "wide"] for info in infos)
    group.call("echo", "note", "x")
    assert [words[-1] for words in group.call("sibling", "words").wait()] == ["x", "x"]


def only_rank_zero_is_called_by_rank_zero(group: LaneGroup) -> None:
    assert group.call("echo", "first").wait() == 0


def the_control_lane_answers_while_the_work_lane_is_busy(group: LaneGroup) -> None:
    dozing = group.call("echo", "doze", seconds=2.0)
    time.sleep(0.3)
    begun = time.monotonic()
    stacks = group.dump_stacks()
    group.post({"cancel": 7})
    assert set(group.ping()) == {0, 1}
    assert group._lanes.control("pulse", range(2), 10.0) == {0: Beats(), 1: Beats()}
    assert time.monotonic() - begun < 1.5
    assert all("in doze" in stacks[rank] for rank in (0, 1))
    dozing.wait()
    assert group.call("echo", "drain").wait() == [{"cancel": 7}]


def wrong_calls_are_refused_before_anything_is_sent(group: LaneGroup) -> None:
    with pytest.raises(ConfigError, match="no role 'ecco'.*did you mean 'echo'"):
        group.call("ecco", "shift", batch_of(1))
    with pytest.raises(ConfigError, match="no registered method 'shfit'.*did you mean 'shift'"):
        group.call("echo", "shfit", batch_of(1))
    with pytest.raises(ColumnError, match="echo.shift: no column 'x'"):
        group.call("echo", "shift", Batch({"y": torch.zeros(2)}))
    with pytest.raises(TypeError, match="pending"):
        group.call("echo", "shift", group.call("echo", "shift", batch_of(1)))


def an_exception_on_all_ranks_leaves_the_group_usable(group: LaneGroup) -> None:
    with pytest.raises(
        WorkerError, match="role 'echo', rank [01] of 2 .node .*, pid .*: fail raised ConfigError"
    ) as got:
        group.call("echo", "fail", rank=-1).wait()
    assert "workers.py" in str(got.value), "the worker's traceback is part of the message"
    assert isinstance(got.value.__cause__, ConfigError)
    assert group.call("echo", "first").wait() == 0


def leaving_and_unpicklable_results_are_errors_too(group: LaneGroup) -> None:
    with pytest.raises(WorkerError, match="leave raised SystemExit: 3"):
        group.call("echo", "leave").wait()
    with pytest.raises(WorkerError, match="unpicklable raised TypeError: cannot pickle"):
        group.call("echo", "unpicklable").wait()
    with pytest.raises(WorkerError, match="unreadable raised ValueError: invalid literal"):
        group.call("echo", "unreadable").wait()
    assert group.call("echo", "first").wait() == 0


def one_failing_rank_is_named_though_its_peer_hangs(open_group: Open) -> None:
    group = open_group(SPECS)
    try:
        begun = time.monotonic()
        with pytest.raises(WorkerError, match=r"(?s)rank 1 of 2 .*ConfigError.*did not answer: rank 0 of 2"):
            group.call("echo", "fail", rank=1).wait()
        assert time.monotonic() - begun < 60
        with pytest.raises(WorkerError, match="cannot go on after"):
            group.call("echo", "first")
    finally:
        group.shutdown()
    with pytest.raises(StateError, match="was shut down"):
        group.call("echo", "first")


def a_deadline_names_who_did_not_answer_and_where_it_stands(open_group: Open, tmp_path: Any) -> None:
    group = open_group(SPECS, deadlines={"doze": 1.0}, stack_folder=tmp_path)
    try:
        group.wait_ready()
        queued = [group.call("echo", "doze", seconds=0.6), group.call("echo", "doze", seconds=0.6)]
        gather(*queued)  # together more than one deadline: the clock of a call starts when it could run
        with pytest.raises(
            DeadlineError, match=r"(?s)role 'echo': doze .* 1 s.* rank 1 of 2 .*answered: rank 0"
        ) as got:
            group.call("echo", "doze", seconds=60.0, rank=1).wait()
        assert "in doze" in str(got.value)
        assert "in doze" in (tmp_path / f"stacks_{group.name}_rank1.txt").read_text()
    finally:
        begun = time.monotonic()
        group.shutdown()
        assert time.monotonic() - begun < 15


def a_stalled_call_is_reported_before_its_deadline_and_the_straggler_after_it(open_group: Open, caplog: Any) -> None:
    group = open_group(SPECS, deadlines={"doze": 6.0})
    try:
        group.call("echo", "note", "before").wait()
        group.stragglers()
        group.call("echo", "doze", seconds=4.5, rank=1).wait()
        stall, straggler = [record.message for record in caplog.records if "echo.doze" in record.message]
        assert "echo.doze runs for 3 s (deadline 6 s)" in stall
        assert "last progress: echo.note; answered: 0" in stall
        assert "suspected: rank 1 of 2 (node" in stall and "in doze" in stall
        assert straggler.startswith("straggler: rank 1 of 2 (node") and "took 4.5 s for echo.doze" in straggler
        assert group.stragglers()["doze"] > 100
    finally:
        group.shutdown()


def a_worker_that_cannot_be_built_is_named(open_group: Open) -> None:
    group = open_group([SPECS[0], WorkerSpec(role="broken", target=f"{WORKERS}:Broken")])
    try:
        first = group.call("echo", "whoami")
        with pytest.raises(
            WorkerError, match="role 'broken', rank [01] of 2 .*: start raised ValueError: no such model"
        ):
            group.wait_ready()
        with pytest.raises(WorkerError, match="echo.whoami was not run, because"):
            first.wait()
    finally:
        group.shutdown()


def a_slow_start_passes_its_deadline(open_group: Open) -> None:
    group = open_group(
        [WorkerSpec(role="slow", target=f"{WORKERS}:Slow", kwargs={"seconds": 120.0})], start_timeout_s=5.0
    )
    try:
        with pytest.raises(DeadlineError, match=r"start passed its deadline of 5 s; no answer from rank 0 of 2"):
            group.wait_ready()
    finally:
        group.shutdown()


def workers_are_closed_at_shutdown(open_group: Open, tmp_path: Any) -> None:
    path = str(tmp_path / "mark")
    group = open_group([WorkerSpec(role="closing", target=f"{WORKERS}:Closing", kwargs={"path": path})])
    group.call("closing", "nothing").wait()
    group.shutdown()
    group.shutdown()
    assert (tmp_path / "mark.0").read_text() == (tmp_path / "mark.1").read_text() == "closed"
