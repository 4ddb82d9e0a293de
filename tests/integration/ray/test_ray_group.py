"""Worker groups of Ray actors: the contract of all groups, and what only Ray does."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybridflow.dispatch.group import WorkerSpec
from hybridflow.single_controller import health
from hybridflow.single_controller.cluster import Cluster, start_ray, stop_ray, with_text_variables
from hybridflow.single_controller.lanes import GroupSettings
from hybridflow.single_controller.local_group import LocalGroup
from hybridflow.single_controller.ray_group import RayGroup
from hybridflow.single_controller.resource_pool import ResourcePool
from hybridflow.utils.errors import ConfigError, MachineError, StateError
from tests.unit.single_controller import contract
from tests.unit.single_controller.contract import SPECS, WORKERS, batch_of

pytestmark = pytest.mark.ray


class Opener:
    """Opens groups one after the other on the two slots of the cluster."""

    def __init__(self, pool: ResourcePool) -> None:
        self._pool = pool

    def __call__(self, specs: Any = SPECS, **settings: Any) -> RayGroup:
        return RayGroup(self._pool, specs, GroupSettings(collective_timeout_s=60, **settings))


@pytest.fixture
def open_pair(cluster: Cluster) -> Iterator[Opener]:
    pool = ResourcePool([2])
    yield Opener(pool)
    pool.release()


def test_a_healthy_group_keeps_the_contract(open_pair: Opener) -> None:
    """One group for all sentences: its start costs seconds."""
    group = open_pair(environment={"FOO": "bar"}, unset=("HF_HUB_OFFLINE",))
    beside = LocalGroup(2, SPECS, preload=())
    try:
        contract.results_are_those_of_one_rank(group, beside)
        contract.only_the_columns_that_are_read_travel(group)
        contract.wide_results_stay_where_they_were_made(group)
        contract.what_the_driver_keeps_leaves_it_once(group)
        contract.a_call_in_flight_holds_what_it_reads(group)
        for maker, reader in ((group, beside), (beside, group)):
            foreign = maker.call("wide", "make", batch_of(6)).wait()
            assert reader.call("wide", "add_up", foreign).wait()["total"].tolist() == [0, 100, 200, 303, 404, 505]
        del foreign
        _wait_for(lambda: group.call("wide", "owned").wait() == [0, 0])
        made = group.call("wide", "make", batch_of(8)).wait()
        assert group.call("wide", "owned").wait() == [1, 1]
        first = made.rows([0])
        del made
        _wait_for(lambda: group.call("wide", "owned").wait() == [1, 0])
        del first
        _wait_for(lambda: group.call("wide", "owned").wait() == [0, 0])
        contract.calls_run_in_submission_order(group)
        contract.roles_of_one_group_share_processes_and_one_thread(group)
        contract.only_rank_zero_is_called_by_rank_zero(group)
        contract.the_control_lane_answers_while_the_work_lane_is_busy(group)
        contract.wrong_calls_are_refused_before_anything_is_sent(group)
        contract.an_exception_on_all_ranks_leaves_the_group_usable(group)
        contract.leaving_and_unpicklable_results_are_errors_too(group)
        names = ("FOO", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "MASTER_ADDR")
        assert group.call("echo", "variables", *names).wait() == [["bar", None, "1", "127.0.0.1"]] * 2
        assert group.call("echo", "torch_came_after").wait() == [True, True]
        pids = [info["pid"] for info in group.call("echo", "whoami").wait()]
        group.call("echo", "note", "y" * (1 << 20)).wait()  # above SHARED_BYTES: through the object store
    finally:
        group.shutdown()
        beside.shutdown()
    assert health.wait_gone(pids, timeout_s=1.0) == []


def _wait_for(happens: Callable[[], bool]) -> None:
    """Ray frees in the background; seconds are plenty."""
    until = time.monotonic() + 20
    while not happens() and time.monotonic() < until:
        gc.collect()
        time.sleep(0.1)
    assert happens()


def test_rows_die_with_the_rank_that_made_them(open_pair: Opener) -> None:
    contract.rows_die_with_the_rank_that_made_them(open_pair)


def test_one_failing_rank_is_named_though_its_peer_hangs(open_pair: Opener) -> None:
    contract.one_failing_rank_is_named_though_its_peer_hangs(open_pair)


def test_a_worker_that_cannot_be_built_is_named(open_pair: Opener) -> None:
    contract.a_worker_that_cannot_be_built_is_named(open_pair)


def test_a_slow_start_passes_its_deadline(open_pair: Opener) -> None:
    contract.a_slow_start_passes_its_deadline(open_pair)


def test_a_deadline_names_who_did_not_answer(open_pair: Opener, tmp_path: Path) -> None:
    contract.a_deadline_names_who_did_not_answer_and_where_it_stands(open_pair, tmp_path)


def test_workers_are_closed_at_shutdown(open_pair: Opener, tmp_path: Path) -> None:
    contract.workers_are_closed_at_shutdown(open_pair, tmp_path)


def test_a_taken_port_is_passed_over(open_pair: Opener) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        group = open_pair(ports=[port, 0])
        try:
            assert group.call("echo", "shift", batch_of(3)).wait()[1]["sum"] == 3
        finally:
            group.shutdown()


# ---------------------------------------------------------------------------------------------------------- resources


def test_more_slots_than_exist_are_refused_at_once_with_what_each_node_has(cluster: Cluster) -> None:
    begun = time.monotonic()
    with pytest.raises(MachineError, match=r"(?s)needs 3 CPU slots.*can never fit.*node .*: 2 in all, . free"):
        RayGroup(ResourcePool([3], name="big"), SPECS)
    assert time.monotonic() - begun < 30
    with pytest.raises(MachineError, match=r"(?s)needs 1 GPUs.*0 in all, 0 free"):
        RayGroup(ResourcePool([1]), SPECS, GroupSettings(device="cuda"))


def test_slots_that_others_hold_are_waited_for_and_then_named(cluster: Cluster) -> None:
    holder = ResourcePool([1, 1], name="holder")
    assert [slot.local_rank for slot in holder.occupy("first", device="cpu")] == [0, 0]
    try:
        with pytest.raises(StateError, match="held by group 'first'"):
            holder.occupy("second", device="cpu")
        with pytest.raises(MachineError, match=r"(?s)did not become free within 2 s.*2 in all, 0 free"):
            ResourcePool([2], fit_timeout_s=2).occupy("third", device="cpu")
    finally:
        holder.release()
    waiting = ResourcePool([2])
    assert len(waiting.occupy("third", device="cpu")) == 2
    waiting.release()


def test_a_connected_driver_does_not_own_the_cluster(cluster: Cluster) -> None:
    second = start_ray()
    assert not second.owned
    stop_ray(second)
    pool = ResourcePool([1])
    assert pool.occupy("still here", device="cpu")
    pool.release()


def test_every_daemon_listens_on_loopback_only(cluster: Cluster) -> None:
    assert cluster.processes
    for pid in cluster.processes:
        for connection in psutil.Process(pid).net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), psutil.Process(pid).cmdline()[
                    :3
                ]


def test_variables_of_a_runtime_env_may_be_numbers() -> None:
    given = {"env_vars": {"NCCL_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": 1, "UNSET": None}, "working_dir": "."}
    expected = {"NCCL_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert with_text_variables(given) == {"env_vars": expected, "working_dir": "."}


def test_specs_are_judged_before_slots_are_taken(cluster: Cluster) -> None:
    pool = ResourcePool([2])
    with pytest.raises(ConfigError, match="no attribute 'Ecco'"):
        RayGroup(pool, [WorkerSpec(role="echo", target=f"{WORKERS}:Ecco")])
    assert pool.occupy("free", device="cpu")
    pool.release()
