"""Places for ranks. A pool shared by roles means one process per slot hosts them all; separate pools run in parallel.

On a GPU a slot is a GPU: a Ray placement group per node entry, and asking for more than exists is an error. On a CPU a
slot is logical: several "nodes" may lie on one machine, and threads are divided among the slots of a machine.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import ray
from ray._private.state import available_resources_per_node  # no public call gives what is free by node (ray 2.60)
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hybridflow.single_controller.cluster import SLOT
from hybridflow.utils.errors import ConfigError, ShortageError, StateError

log = logging.getLogger(__name__)

FIT_TIMEOUT_S = 20.0
"""How long slots that exist but are taken are waited for; the error must come within 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for one rank."""

    local_rank: int
    """Position within its node entry."""
    threads: int
    """Threads that its process may use."""
    options: Mapping[str, Any]
    """Ray actor options that put a process there."""


class Slots(Protocol):
    """Places for the ranks of one group."""

    @property
    def world(self) -> int:
        """How many."""
        ...

    def occupy(self, group: str, *, device: str) -> list[Slot]:
        """The slots, now held by ``group``; by rank."""
        ...

    def vacate(self) -> None:
        """Another group may hold the slots now; they stay reserved."""
        ...


class ResourcePool:
    """Slots on nodes.

    Args:
        slots_per_node: slots by node; rank order is node by node.
        name: shown in errors.
        fit_timeout_s: how long slots that others hold are waited for.
    """

    def __init__(
        self, slots_per_node: Sequence[int], *, name: str = "pool", fit_timeout_s: float = FIT_TIMEOUT_S
    ) -> None:
        if not slots_per_node or min(slots_per_node) < 1:
            raise ConfigError(f"a resource pool needs nodes with at least one slot each, got {list(slots_per_node)}")
        self.slots_per_node = tuple(slots_per_node)
        self.name = name
        self._fit_timeout_s = fit_timeout_s
        self._groups: list[PlacementGroup] = []
        self._slots: dict[str, list[Slot]] = {}
        self._occupant: str | None = None

    @property
    def world(self) -> int:
        """Slots in all."""
        return sum(self.slots_per_node)

    def occupy(self, group: str, *, device: str) -> list[Slot]:
        """The slots, now held by ``group``; by rank.

        Raises:
            StateError: another group holds them; roles that share a pool belong into one group.
            ShortageError: they do not fit; says what is needed and what each node has.
        """
        if self._occupant is not None:
            raise StateError(
                f"pool {self.name!r} is held by group {self._occupant!r}: give group {group!r} its own pool, or put "
                "its roles into that group"
            )
        slots = self.reserved(device)
        self._occupant = group
        return slots

    def parts(self, count: int) -> list[PoolPart]:
        """``count`` equal runs of consecutive slots, each for a group of its own; then no group may hold them all."""
        world = self.world // count
        return [PoolPart(self, number * world, world) for number in range(count)]

    def reserved(self, device: str) -> list[Slot]:
        """All slots, by rank, reserved at the first call. Raises ShortageError: see ``occupy``."""
        if device not in self._slots:
            self._slots[device] = self._reserve(device)
        return self._slots[device]

    def vacate(self) -> None:
        """Another group may hold the slots now; they stay reserved."""
        self._occupant = None

    def release(self) -> None:
        """Gives the slots back to the cluster."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups, self._slots, self._occupant = [], {}, None

    # ------------------------------------------------------------------------------------------------- reservation

    def _reserve(self, device: str) -> list[Slot]:
        if device != "cpu":
            return self._reserve_counted("GPU", {"num_gpus": 1, "num_cpus": 0})
        if any(SLOT in node["Resources"] for node in _nodes()):
            return self._reserve_counted(SLOT, {"resources": {SLOT: 1}, "num_cpus": 0})
        return self._spread()

    def _reserve_counted(self, resource: str, takes: Mapping[str, Any]) -> list[Slot]:
        totals = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in _nodes()}
        if not _fits(self.slots_per_node, totals.values()):
            raise ShortageError(self._shortage(resource, "can never fit"))
        groups = [placement_group([{resource: 1}] * slots, strategy="STRICT_PACK") for slots in self.slots_per_node]
        self._groups += groups
        for group in groups:
            if not group.wait(self._fit_timeout_s / len(groups)):
                text = self._shortage(resource, f"did not become free within {self._fit_timeout_s:g} s")
                self.release()
                raise ShortageError(text)
        homes = [placement_group_table(group)["bundles_to_node_id"][0] for group in groups]
        strategies = [
            [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(slots)]
            for group, slots in zip(groups, self.slots_per_node, strict=True)
        ]
        return self._make_slots(homes, strategies, takes)

    def _spread(self) -> list[Slot]:
        nodes = [node["NodeID"] for node in _nodes()]
        homes = [nodes[i % len(nodes)] for i in range(len(self.slots_per_node))]
        strategies = [
            [NodeAffinitySchedulingStrategy(node_id=home, soft=False)] * slots
            for home, slots in zip(homes, self.slots_per_node, strict=True)
        ]
        return self._make_slots(homes, strategies, {"num_cpus": 0})

    def _make_slots(
        self, homes: Sequence[str], strategies: Sequence[Sequence[Any]], takes: Mapping[str, Any]
    ) -> list[Slot]:
        cores = {node["NodeID"]: max(1, int(node["Resources"].get("CPU", 1))) for node in _nodes()}
        load: Counter[str] = Counter()
        for home, slots in zip(homes, self.slots_per_node, strict=True):
            load[home] += slots
        for home, slots in load.items():
            if slots > cores[home]:
                _warn_oversubscribed(self.name, slots, cores[home])
        return [
            Slot(
                local_rank=i,
                threads=max(1, cores[home] // load[home]),
                options={**takes, "scheduling_strategy": strategy},
            )
            for home, by_slot in zip(homes, strategies, strict=True)
            for i, strategy in enumerate(by_slot)
        ]

    def _shortage(self, resource: str, what: str) -> str:
        free = available_resources_per_node()
        lines = [
            f"  node {node['NodeManagerHostname']} ({node['NodeManagerAddress']}): "
            f"{int(node['Resources'].get(resource, 0))} in all, "
            f"{int(free.get(node['NodeID'], {}).get(resource, 0))} free"
            for node in _nodes()
        ]
        kind = "GPUs" if resource == "GPU" else f"CPU slots (Ray resource {resource})"
        needed = " + ".join(map(str, self.slots_per_node))
        return "\n".join([f"pool {self.name!r} needs {needed} {kind}, one sum per node; they {what}:", *lines])


class PoolPart:
    """Consecutive slots of a pool for one of several groups: they stay reserved when that group is replaced.

    Args:
        pool: reserves the slots, for all its parts at once.
        first: position of the first of them.
        world: how many.
    """

    def __init__(self, pool: ResourcePool, first: int, world: int) -> None:
        self.world = world
        self._pool = pool
        self._first = first

    def occupy(self, group: str, *, device: str) -> list[Slot]:
        """See ``Slots.occupy``; ``group`` follows another only when that has vacated them."""
        del group
        return self._pool.reserved(device)[self._first : self._first + self.world]

    def vacate(self) -> None:
        """See ``Slots.vacate``."""


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _fits(needs: Sequence[int], rooms: Any) -> bool:
    """Whether every need finds a room (largest need into the roomiest)."""
    free = list(rooms)
    for need in sorted(needs, reverse=True):
        roomiest = max(range(len(free)), key=free.__getitem__)
        if free[roomiest] < need:
            return False
        free[roomiest] -= need
    return True


@cache
def _warn_oversubscribed(pool: str, slots: int, cores: int) -> None:
    log.warning("pool %r has %d slots on a machine of %d cores: ranks share cores, 1 thread each", pool, slots, cores)
