"""A replica of a generator that is killed: started again, given its weights, and its rows are done again."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.dispatch.group import WorkerGroup, WorkerSpec
from hybridflow.single_controller import health, lanes
from hybridflow.single_controller.lanes import GroupSettings
from hybridflow.single_controller.local_group import LocalGroup
from hybridflow.single_controller.replicas import ReplicaGroup
from hybridflow.utils.errors import DeadlineError, LostError, WorkerError
from tests import ranks
from tests.unit.single_controller.contract import SPECS, WORKERS

assert ranks  # the session's preloads
SPEC = (WorkerSpec(role="server", target=f"{WORKERS}:Server"),)
ROWS = Batch({"x": torch.arange(7)})
Open = Callable[..., ReplicaGroup]


@pytest.fixture
def open_replicas() -> Iterator[Open]:
    opened = []

    def give(
        welcome: Callable[[int, WorkerGroup], None] | None = None,
        deadlines: Mapping[str, float] | None = None,
        silence_s: float | None = None,
        **settings: Any,
    ) -> ReplicaGroup:
        limits: dict[str, Any] = {"deadlines": deadlines or {}, "silence_s": silence_s}
        group = ReplicaGroup(
            lambda number: LocalGroup(2, SPEC, GroupSettings(name=f"replica{number}", **limits), preload=()),
            2,
            **{"restarts": 2, **settings},
        )
        group.welcome = welcome or (lambda number, replica: replica.call("server", "hold", 3).wait())
        opened.append(group)
        group.wait_ready()
        return group

    yield give
    for group in opened:
        group.shutdown()


def pids(group: ReplicaGroup) -> list[list[int]]:
    """Of the ranks by replica, which hold version 3 from here on."""
    flat = group.call("server", "hold", 3).wait()
    return [flat[:2], flat[2:]]


def kill_later(pid: int, seconds: float = 0.4) -> None:
    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()


def test_rows_come_in_their_order_from_any_number_of_replicas(open_replicas):
    group = open_replicas()
    assert len({pid for replica in pids(group) for pid in replica}) == 4 == group.world
    assert group.call("server", "serve", ROWS).wait()["y"].tolist() == [3000 + i for i in range(7)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_replica_killed_while_it_serves_is_replaced_and_its_rows_are_done_again(open_replicas, victim):
    group = open_replicas()
    before = pids(group)
    kill_later(before[victim][1])
    begun = time.monotonic()
    served = group.call("server", "serve", ROWS, seconds=1.5).wait()
    assert served["y"].tolist() == [3000 + i for i in range(7)], "the new replica holds the current version"
    assert time.monotonic() - begun < 30
    assert group.restarted == 1
    assert health.wait_gone(before[victim], timeout_s=0.0) == []
    after = pids(group)
    assert after[1 - victim] == before[1 - victim], "the other replica was left alone"
    assert not set(after[victim]) & set(before[victim])


@pytest.fixture
def trainer() -> Iterator[LocalGroup]:
    group = LocalGroup(2, SPECS, preload=())
    group.wait_ready()
    yield group
    group.shutdown()


def test_a_wait_on_another_group_starts_the_new_process_and_goes_on(open_replicas, trainer):
    group = open_replicas()
    before = pids(group)
    kill_later(before[0][0])
    trainer.call("echo", "doze", seconds=2.0).wait()
    assert group.restarted == 1 and health.wait_gone(before[0], timeout_s=0.0) == [], (
        "it is replaced before it is asked"
    )
    assert group.standing(0) is None, "no row goes to it before it was welcomed"
    assert group.call("server", "serve", ROWS).wait()["y"].tolist() == [3000 + i for i in range(7)]
    assert group.restarted == 1


def test_a_death_that_cannot_be_made_good_ends_a_wait_on_another_group(open_replicas, trainer):
    group = open_replicas(restarts=0)
    kill_later(pids(group)[1][0])
    with pytest.raises(
        LostError, match=r"given up, because replica 1 of group 'replicas' is lost and no restart is left"
    ):
        trainer.call("echo", "doze", seconds=60.0).wait()
    with pytest.raises(LostError, match="no restart is left"):
        group.call("server", "serve", ROWS).wait()


def test_a_death_elsewhere_is_not_taken_for_the_replicas(trainer, open_replicas):
    group = open_replicas()
    pids(group)
    kill_later(trainer.call("echo", "whoami").wait()[0]["pid"])
    with pytest.raises(LostError, match=r"serve given up, because rank 0 of 2 .* of group 'local'"):
        group.call("server", "serve", ROWS, seconds=30.0).wait()
    assert group.restarted == 0


def test_rows_of_a_replica_that_dies_before_they_are_taken_over_are_done_again(open_replicas):
    """What it has answered is of no use while it lies in its memory."""
    deaths: list[int] = []

    def hold(rows: Batch) -> Batch:
        if not deaths:
            deaths.append(before[0][0])
            os.kill(before[0][0], signal.SIGKILL)
            raise LostError("rows are lost")
        return rows.fetched()

    group = open_replicas(hold=hold)
    before = pids(group)
    assert group.call("server", "serve", ROWS).wait()["y"].tolist() == [3000 + i for i in range(7)]
    assert group.restarted == 1


def test_a_replica_that_dies_as_soon_as_it_is_back_uses_up_the_restarts(open_replicas):
    def deadly(number: int, replica: WorkerGroup) -> None:
        (pid, _) = replica.call("server", "hold", 3).wait()
        os.kill(pid, signal.SIGKILL)
        replica.call("server", "hold", 3).wait()

    group = open_replicas()
    kill_later(pids(group)[0][0], 0.0)
    group.welcome = deadly
    time.sleep(0.5)
    with pytest.raises(LostError, match=r"replica 0 of group 'replicas' is lost and no restart is left: .*rank 0 of 2"):
        group.call("server", "serve", ROWS).wait()
    assert group.restarted == 2


def test_a_replica_that_hangs_is_killed_and_its_rows_are_done_again(open_replicas, monkeypatch):
    """A stopped process neither answers nor dies: the deadline of the call says that it is lost."""
    monkeypatch.setattr(lanes, "STACKS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(lanes, "STACKS_S", 0.2)
    group = open_replicas(deadlines={"serve": 1.5})
    before = pids(group)
    os.kill(before[1][0], signal.SIGSTOP)
    assert group.call("server", "serve", ROWS).wait()["y"].tolist() == [3000 + i for i in range(7)]
    assert group.restarted == 1
    assert health.wait_gone(before[1], timeout_s=0.0) == []
    assert pids(group)[0] == before[0], "the other replica was left alone"


def test_a_replica_that_stands_still_is_replaced_long_before_the_deadline_of_its_call(
    open_replicas, caplog, monkeypatch
):
    monkeypatch.setattr(lanes, "STACKS_TIMEOUT_S", 0.2)
    group = open_replicas(silence_s=2.5)
    before = pids(group)
    os.kill(before[1][0], signal.SIGSTOP)
    begun = time.monotonic()
    assert group.call("server", "serve", ROWS).wait()["y"].tolist() == [3000 + i for i in range(7)]
    assert time.monotonic() - begun < 30.0, "its deadline is an hour"
    assert group.restarted == 1 and pids(group)[0] == before[0]
    assert re.search(rf"serve hangs: rank 0 of 2 \(node \S+, pid {before[1][0]}\): its control lane", caplog.text)


def test_a_replica_that_lives_but_ends_no_step_is_replaced(open_replicas, tmp_path, caplog):
    """Before its first step it had ten times as long; with steps known, ten times the longest, at least silence_s."""
    group = open_replicas(silence_s=2.5)
    stuck = str(tmp_path / "stuck")
    call = group.call("server", "serve_in_steps", ROWS, steps=8, seconds=0.02, stuck=stuck)
    assert call.wait()["y"].tolist() == [3000 + i for i in range(7)]
    assert group.restarted == 1
    assert re.search(
        r"serve_in_steps hangs: rank . of 2 \(.*\): no step of it has ended for [1-9] s; its longest", caplog.text
    )


@pytest.mark.parametrize(
    "how", [{"steps": 40, "seconds": 0.1}, {"steps": 2, "seconds": 4.0}, {"steps": 1, "waits_s": 5.0}]
)
def test_a_slow_replica_is_left_alone(open_replicas, how):
    """Many short steps; steps longer than silence_s, of which nothing was known; a long wait for others."""
    group = open_replicas(silence_s=2.0)
    before = pids(group)
    call = group.call("server", "serve_in_steps", ROWS, **{"seconds": 0.0, **how})
    assert call.wait()["y"].tolist() == [3000 + i for i in range(7)]
    assert group.restarted == 0 and pids(group) == before


def test_work_that_takes_a_new_replica_too_long_as_well_is_no_hang(open_replicas, monkeypatch):
    monkeypatch.setattr(lanes, "STACKS_S", 0.2)
    group = open_replicas(deadlines={"serve": 0.5})
    with pytest.raises(DeadlineError, match="serve passed its deadline of 0.5 s"):
        group.call("server", "serve", ROWS.rows([0]), seconds=30.0).wait()
    assert group.restarted == 1, "and not as often as deaths may be made good"


def test_a_replica_that_hangs_is_found_by_a_wait_on_another_group(open_replicas, trainer, monkeypatch):
    """Its own call has passed its deadline in a thread that has given up since."""
    monkeypatch.setattr(lanes, "STACKS_S", 0.2)
    group = open_replicas(deadlines={"serve": 0.3})
    before = pids(group)
    with pytest.raises(DeadlineError):
        group.standing(0).call("server", "serve", ROWS.rows([0, 1]), seconds=30.0).wait()
    trainer.call("echo", "doze", seconds=1.0).wait()
    assert group.restarted == 1 and health.wait_gone(before[0], timeout_s=0.0) == []


def test_what_a_replica_raises_is_raised_and_nothing_is_restarted(open_replicas):
    group = open_replicas(welcome=lambda number, replica: None)
    with pytest.raises(WorkerError, match="asked to serve without weights") as got:
        group.call("server", "serve", ROWS).wait()
    assert not isinstance(got.value, LostError)
    assert group.restarted == 0
