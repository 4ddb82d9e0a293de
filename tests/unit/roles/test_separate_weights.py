"""The handle of a generator in another pool: who is to blame when a link breaks, and what all transfers were."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from hybridflow.dispatch.group import RankContext, WorkerSpec
from hybridflow.dispatch.register import register
from hybridflow.roles.protocols import Broken, Metrics
from hybridflow.roles.separate_weights import SeparateWeightsHandle, combine_replicas
from hybridflow.single_controller import health, lanes
from hybridflow.single_controller.lanes import GroupSettings
from hybridflow.single_controller.local_group import LocalGroup
from hybridflow.single_controller.replicas import ReplicaGroup
from hybridflow.utils.errors import LostError, WorkerError
from tests import ranks

assert ranks  # the session's preloads
MOVED = {"publish/bytes": 4.0, "publish/bound_bytes": 4.0, "publish/seconds": 1.0}


class Side:
    """One side of a link over which version 1 does not get: the trainers fail, and the replica loses its peers.

    Version 2 gets there at the second try: the trainers have waited for a replica that hangs.
    """

    def __init__(self, context: RankContext, *, sends: bool) -> None:
        self.sends = sends
        self.tries = 0

    @register(dispatch="RANK_ZERO")
    def meeting(self) -> str:
        """Nowhere."""
        return "nowhere"

    @register(dispatch="ONE_TO_ALL")
    def join(self, **named: object) -> None:
        """Nothing."""

    @register(dispatch="ONE_TO_ALL")
    def publish(self, *, version: int, link: int = 0) -> Metrics | Broken:
        """Metrics."""
        if version == 1:
            if self.sends:
                return Broken("MemoryError: out of memory")
            raise RuntimeError("Connection closed by peer")
        self.tries += version == 2
        return Broken("timed out") if self.sends and self.tries == 1 else MOVED


def specs(*, sends: bool) -> list[WorkerSpec]:
    return [WorkerSpec(role="weights", target=f"{__name__}:Side", kwargs={"sends": sends})]


@contextmanager
def linked(settings: GroupSettings) -> Iterator[tuple[SeparateWeightsHandle, ReplicaGroup]]:
    """Two trainers and one replica, which has ``settings``."""
    with ExitStack() as stack:
        trainers = LocalGroup(2, specs(sends=True), preload=())
        stack.callback(trainers.shutdown)
        generator = ReplicaGroup(
            lambda number: LocalGroup(1, specs(sends=False), settings, preload=(), apart=True), 1, restarts=3
        )
        stack.callback(generator.shutdown)
        weights = SeparateWeightsHandle(trainers, generator, "weights")
        generator.welcome = weights.welcome
        weights.join()
        yield weights, generator


def test_a_replica_that_hangs_in_a_publish_is_replaced_and_its_successor_gets_the_version(monkeypatch):
    monkeypatch.setattr(lanes, "STACKS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(lanes, "STACKS_S", 0.2)
    with linked(GroupSettings(name="sampling", deadlines={"publish": 1.0})) as (weights, generator):
        weights.publish(version=0).wait()
        place = generator._replicas[0]._lanes.place(0)
        os.kill(place.pid, signal.SIGSTOP)
        metrics = weights.publish(version=2).wait()
        assert metrics["publish/bytes"] == 3 * 4.0 and metrics["rollout/replica_restarts"] == 1.0
        assert health.wait_gone([place.pid], timeout_s=0.0) == []


def test_trainers_that_fail_are_blamed_and_no_replica_is_restarted_for_it():
    with linked(GroupSettings(name="sampling")) as (weights, generator):
        assert weights.publish(version=0).wait()["publish/bytes"] == 3 * 4.0
        with pytest.raises(
            WorkerError, match=r"replica 0 of the generator failed on ranks 0, 1(.|\n)*out of mem"
        ) as got:
            weights.publish(version=1).wait()
        assert not isinstance(got.value, LostError), "another try would meet it again"
        assert generator.restarted == 0


def test_transfers_one_after_the_other_add_up():
    one = {**MOVED, "publish/peak_extra_bytes": 3.0, "publish/rounds": 1.0, "residency/wake_cache_seconds": 1.0}
    two = {**MOVED, "publish/peak_extra_bytes": 2.0, "publish/rounds": 2.0, "residency/wake_cache_seconds": 2.0}
    assert combine_replicas([one, two]) == {
        "publish/bytes": 8.0,
        "publish/bound_bytes": 8.0,
        "publish/seconds": 2.0,
        "publish/peak_extra_bytes": 3.0,
        "publish/rounds": 2.0,
        "residency/wake_cache_seconds": 2.0,
        "publish/ratio_to_bound": 1.0,
    }
