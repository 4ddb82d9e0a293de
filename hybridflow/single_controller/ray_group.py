"""A worker group of Ray actors: one process per slot of a pool, on any number of nodes."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import hybridflow
from hybridflow.batch.batch import Batch
from hybridflow.batch.refs import Bytes, Kept
from hybridflow.dispatch.group import RankContext, WorkerSpec
from hybridflow.single_controller import health
from hybridflow.single_controller.calls import CallTable, PreparedCall
from hybridflow.single_controller.host import Failure, Place, Reply, failure_of
from hybridflow.single_controller.lanes import GroupSettings, LaneGroup
from hybridflow.single_controller.oom import OomKills, oom_kills
from hybridflow.single_controller.ray_actor import CONTROL, RankActor
from hybridflow.single_controller.ray_store import RayKept
from hybridflow.single_controller.resource_pool import Slot, Slots
from hybridflow.single_controller.wire import pack, unpack
from hybridflow.utils.errors import LostError

log = logging.getLogger(__name__)

CONTROL_THREADS = 4
"""One is taken by ``stay``; the rest answer."""
CLOSE_TIMEOUT_S = 20.0
"""How long shutdown waits for workers to close before their processes are killed."""
LAST_WORDS_S = 5.0
"""How long another node is waited for that is asked why a rank on it died."""
SILENT_END = "Worker unexpectedly exits with a connection error"
"""How Ray (2.60) begins when a process ended without a word."""
SHARED_BYTES = 64 << 10
"""Arguments above this that several ranks get are put into the object store once."""


class RayGroup(LaneGroup):
    """A group with one rank per slot of ``pool``; returns at once, ``wait_ready`` or the first result waits.

    Args:
        pool: its slots are held until ``shutdown``.
        specs: roles, built in this order on every rank.
        settings: name, device and deadlines; on ``cuda`` each process sees its one GPU as ``cuda:0``.

    Raises:
        ConfigError: see ``CallTable``.
        StateError, ShortageError: see ``ResourcePool.occupy``.
    """

    def __init__(self, pool: Slots, specs: Sequence[WorkerSpec], settings: GroupSettings | None = None) -> None:
        settings = settings or GroupSettings(name="ray")
        table = CallTable(specs, pool.world)
        slots = pool.occupy(settings.name, device=settings.device)
        actors = [_actor(slot, environment=settings.environment, unset=settings.unset) for slot in slots]
        contexts = [
            RankContext(
                rank=rank,
                world=pool.world,
                local_rank=slot.local_rank,
                node="",
                device="cpu" if settings.device == "cpu" else "cuda:0",
                threads=slot.threads,
            )
            for rank, slot in enumerate(slots)
        ]
        lanes = _Actors(actors, pool)
        lanes.start(contexts, specs, settings)
        super().__init__(lanes, table, world=pool.world, settings=settings)


def _actor(slot: Slot, *, environment: Mapping[str, str], unset: Sequence[str]) -> ActorHandle[RankActor]:
    variables = {"OMP_NUM_THREADS": str(slot.threads), "PYTHONPATH": os.pathsep.join(import_path()), **environment}
    # Ray's annotations know no concurrency groups, and call what they make a proxy: both travel untyped.
    settings: dict[str, Any] = {"concurrency_groups": {CONTROL: CONTROL_THREADS}, "max_restarts": 0}
    remote: Any = ray.remote(**settings, max_task_retries=0)(RankActor).options(
        **slot.options,
        runtime_env={"env_vars": variables},
    )
    return remote.remote([variable for variable in unset if variable not in environment], sys.path)


def import_path() -> list[str]:
    """Where a rank finds hybridflow and the user's modules: our parent folder, the working folder, PYTHONPATH."""
    own = str(Path(hybridflow.__file__).resolve().parents[1])
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return list(dict.fromkeys([own, str(Path.cwd()), *given]))


class _Actors:
    """Lanes over Ray actors."""

    def __init__(self, actors: Sequence[ActorHandle[RankActor]], pool: Slots) -> None:
        self.moved = 0
        self._actors = list(actors)
        self._pool = pool
        self._places: list[ray.ObjectRef[Any]] = [actor.place.remote() for actor in actors]
        self._known: dict[int, Place] = {}
        self._nodes: dict[int, str] = {}
        self._stays: list[ray.ObjectRef[Any]] = [actor.stay.remote() for actor in actors]
        self._waiting: dict[int, dict[int, ray.ObjectRef[Any]]] = {}
        self._deaths: dict[int, Failure] = {}
        self._meeting: ray.ObjectRef[Any] | None = None

    def start(self, contexts: Sequence[RankContext], specs: Sequence[WorkerSpec], settings: GroupSettings) -> None:
        """Queues the start on every rank: rank 0 opens the store, the others take its address as a reference."""
        timeout_s = settings.collective_timeout_s
        self._meeting = self._actors[0].serve.remote(list(settings.ports), timeout_s)
        self._waiting[0] = {
            rank: actor.start.remote(pack((context, tuple(specs))), self._meeting, settings.backend, timeout_s)
            for rank, (actor, context) in enumerate(zip(self._actors, contexts, strict=True))
        }

    def send(self, number: int, call: PreparedCall) -> None:
        packed: dict[int, tuple[bytes | ray.ObjectRef[bytes], list[Any]]] = {}
        copies = [id(share) for share in call.shares]
        refs = {}
        for rank, share in enumerate(call.shares):
            if share is None:
                continue
            if id(share) not in packed:
                kept: list[Any] = []
                payload = pack(share.map_batches(lambda batch: batch.readable(RayKept)), kept)
                self.moved += len(payload)
                shared = len(payload) > SHARED_BYTES and copies.count(id(share)) > 1
                packed[id(share)] = (ray.put(payload) if shared else payload), kept
            wanted = rank in call.wanted
            refs[rank] = self._actors[rank].work.remote(call.role, call.method, wanted, *packed[id(share)])
        self._waiting[number] = refs

    def keep(self, batch: Batch) -> Batch:
        return batch.kept(self)

    def put(self, data: Bytes) -> Kept:
        """Keeps what the driver made (``Store.put``)."""
        self.moved += data.size
        return self.open(ray.put(data), data.size, "the driver")

    def open(self, token: ray.ObjectRef[Bytes], size: int, owner: str, rank: int | None = None) -> Kept:
        """The driver's reference to an object that ``rank`` keeps; None: the driver itself (``Store.open``)."""
        return RayKept(token, size, owner, partial(self._before_read, rank))

    def _before_read(self, rank: int | None, kept: Kept) -> None:
        if rank in self.deaths():
            raise LostError(f"rows are lost: they were kept by {kept.owner}, which is gone")
        self.moved += kept.size

    def receive(self, number: int, timeout_s: float) -> dict[int, Reply]:
        refs = self._waiting.get(number, {})
        if not refs:
            return {}
        ranks = {ref: rank for rank, ref in refs.items()}
        ray.wait(list(ranks), num_returns=1, timeout=timeout_s)
        ready, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=0)
        replies = {ranks[ref]: self._reply(ranks[ref], ref) for ref in ready}
        for rank in replies:
            del refs[rank]
        if not refs:
            del self._waiting[number]
        return replies

    def _reply(self, rank: int, ref: ray.ObjectRef[Any]) -> Reply:
        try:
            data, kept = ray.get(ref)
        except RayTaskError as error:  # our own actor code failed; a worker's errors come inside a Reply
            kind, message = type(error.cause).__name__, str(error.cause)
            return Reply(failure=Failure(rank=rank, kind=kind, message=message, trace=str(error), at=time.time()))
        except RayError as error:
            return Reply(failure=self._death(rank, error))
        self.moved += len(data)
        try:
            return unpack(data, partial(self.open, rank=rank), kept)
        except Exception as error:  # noqa: BLE001 - raised by ``wait`` with role, rank and method
            return Reply(failure=failure_of(error, rank))

    def _death(self, rank: int, error: RayError) -> Failure:
        if rank not in self._deaths:
            place = self.place(rank)
            log, now = self._last_words(rank, place, error) if place else ("", None)
            self._deaths[rank] = Failure(
                rank=rank,
                kind="died",
                message=_cause(error, log, place.oom_kills if place else None, now),
                trace=log,
                at=time.time(),
            )
        return self._deaths[rank]

    def _last_words(self, rank: int, place: Place, error: RayError) -> tuple[str, OomKills | None]:
        """The end of a dead rank's log and its node's counters; another node is asked, while it lives."""
        if self._is_here(place):
            return last_words(place.log)
        node = self._nodes[rank]
        if isinstance(error, ActorUnavailableError) or node not in {n["NodeID"] for n in ray.nodes() if n["Alive"]}:
            return "", None
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(last_words)
        home = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(import_path())}}
        asked = remote.options(scheduling_strategy=home, runtime_env=environment).remote(place.log)
        try:
            return ray.get(asked, timeout=LAST_WORDS_S)
        except RayError:  # the node is going, too (GetTimeoutError is one)
            return "", None

    def deaths(self) -> dict[int, Failure]:
        gone, _ = ray.wait(self._stays, num_returns=len(self._stays), timeout=0)
        for ref in gone:
            rank = self._stays.index(ref)
            try:
                ray.get(ref)
            except RayError as error:
                self._death(rank, error)
        return dict(self._deaths)

    def place(self, rank: int) -> Place | None:
        if rank not in self._known:
            ready, _ = ray.wait([self._places[rank]], timeout=0)
            if not ready:
                return None
            try:
                host, self._nodes[rank], pid, log, killed = ray.get(ready[0])
            except RayError:  # it died before it could tell
                return None
            self._known[rank] = Place(node=host, pid=pid, log=log, oom_kills=killed)
        return self._known[rank]

    def control(self, operation: str, ranks: Sequence[int], timeout_s: float, *args: Any) -> dict[int, Any]:
        asked_at = time.monotonic()
        waiting: dict[ray.ObjectRef[Any], int] = {}
        for rank in ranks:
            waiting[self._actors[rank].control.remote(operation, args)] = rank
        answers: dict[int, Any] = {}
        while waiting and (left_s := asked_at + timeout_s - time.monotonic()) > 0:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left_s)
            for ref in ready:
                rank = waiting.pop(ref)
                try:
                    answer = ray.get(ref)
                except RayError:  # a dead rank does not answer
                    continue
                answers[rank] = time.monotonic() - asked_at if operation == "ping" else answer
        return answers

    def end(self, *, polite: bool) -> None:
        here = [place.pid for rank in range(len(self._actors)) if (place := self.place(rank)) and self._is_here(place)]
        pids = [*here, *health.descendants(here)]
        if polite:
            self._close()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        health.kill(health.wait_gone(pids, timeout_s=5.0))
        health.remove_segments(pids, self._ports())
        self._pool.vacate()

    def _close(self) -> None:
        closing: list[ray.ObjectRef[Any]] = [actor.close.remote() for actor in self._actors]
        done, late = ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        if late:
            log.warning("%d ranks did not close their workers within %g s and are ended", len(late), CLOSE_TIMEOUT_S)
        for ref in done:
            try:
                ray.get(ref)
            except RayError as error:  # the process ends anyway
                log.warning("closing a worker failed: %s", error)

    def _is_here(self, place: Place) -> bool:
        return place.node == os.uname().nodename

    def _ports(self) -> list[int]:
        if self._meeting is None:
            return []
        try:
            return [ray.get(self._meeting, timeout=0).port]
        except RayError:  # rank 0 never served (GetTimeoutError is one)
            return []


def last_words(log: str) -> tuple[str, OomKills | None]:
    """The end of a log of this node, and the kernel's counters now."""
    return health.last_lines(log), oom_kills()


def _cause(error: RayError, log: str, before: OomKills | None, now: OomKills | None) -> str:
    if isinstance(error, OutOfMemoryError):
        return f"Ray's memory monitor ended it: {error}"
    if isinstance(error, ActorUnavailableError):
        return f"its node cannot be reached: {error}"
    text = " ".join(str(error).split())
    if not isinstance(error, ActorDiedError):
        return text
    if SILENT_END in text:  # Ray saw a connection close and names three guesses
        return health.log_cause(log) or health.killed_cause(before, now)
    _, found, rest = text.partition("The actor is dead because ")
    return rest if found else text
