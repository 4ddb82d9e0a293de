"""Which slice goes from whom to whom: pure integers, no torch, no process group.

Input: *slices*. A slice is one block pattern of one training parameter: what every rank owns of it (trainer) and what
every rank needs of it (generator), as boxes in the coordinates of the Hugging Face parameter. Output, for one rank:
what it sends, receives and copies. The plan is exact overlap: nothing is sent that the receiver does not store, and
nothing that it already owns. So a rank receives its bound,

    sum over slices of  bytes(needed) - bytes(needed and owned),

whatever the layouts are; how large that bound is depends on the training layout (``layouts.py``).

Layers share their boxes, so slices with the same tables form a *group* whose work is done once: a rank's plan for a
thousand ranks takes milliseconds per distinct parameter of a layer, not per parameter.

Who serves a slice that several ranks own: the receiver itself, else an owner of the receiver's machine, else anyone;
among equals, receivers take turns by their position, so that every rank finds the same answer alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridflow.hybrid_engine.boxes import Box, BoxTable, extents, intersect, volume
from hybridflow.utils.errors import ConfigError, EngineError


@dataclass(frozen=True, slots=True)
class Slice:
    """One block pattern of one training parameter, with its tables by rank.

    Tables that are equal should be the same object: grouping goes by identity.
    """

    name: str
    """Training parameter."""
    slot: int
    """0, 1, ...: a generation rank may hold several blocks of one parameter."""
    dtype: str
    """Name of the torch dtype in which it travels and is stored by the generator."""
    itemsize: int
    """Bytes of an element."""
    owned: BoxTable
    needed: BoxTable


@dataclass(frozen=True, slots=True)
class Move:
    """One block to or from a peer."""

    peer: int
    box: Box


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one rank does for every slice of a group."""

    slices: tuple[int, ...]
    """Indexes of the slices, ascending."""
    itemsize: int
    owned: Box | None
    """This rank's training block."""
    needed: Box | None
    """This rank's generation block."""
    sends: tuple[Move, ...]
    """By peer, ascending."""
    receives: tuple[Move, ...]
    """By peer, ascending."""
    local: Box | None
    """Copied in place."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave this rank."""
        return len(self.slices) * self.itemsize * sum(volume(move.box) for move in self.sends)

    @property
    def received_bytes(self) -> int:
        """Bytes that reach this rank."""
        return len(self.slices) * self.itemsize * sum(volume(move.box) for move in self.receives)

    @property
    def bound_bytes(self) -> int:
        """Bytes that this rank needs and does not own."""
        missing = volume(self.needed) - volume(intersect(self.owned, self.needed))
        return len(self.slices) * self.itemsize * missing

    @property
    def held_bytes(self) -> int:
        """Bytes that this rank holds for the generator."""
        return len(self.slices) * self.itemsize * volume(self.needed)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything one rank does in a publish."""

    rank: int
    world: int
    groups: tuple[GroupPlan, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave this rank."""
        return sum(group.sent_bytes for group in self.groups)

    @property
    def received_bytes(self) -> int:
        """Bytes that reach this rank."""
        return sum(group.received_bytes for group in self.groups)

    @property
    def bound_bytes(self) -> int:
        """The least that this rank can receive, given its own shards."""
        return sum(group.bound_bytes for group in self.groups)

    @property
    def held_bytes(self) -> int:
        """Bytes that the generator stores here."""
        return sum(group.held_bytes for group in self.groups)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks (sent, received, copied in place)."""
        return (
            sum(len(group.slices) * len(group.sends) for group in self.groups),
            sum(len(group.slices) * len(group.receives) for group in self.groups),
            sum(len(group.slices) * (group.local is not None) for group in self.groups),
        )

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that this one receives from."""
        return tuple(sorted({move.peer for group in self.groups for move in group.receives}))

    def to_json(self) -> str:
        """Canonical text of the plan; equal plans give equal text."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> RankPlan:
        """The plan that ``to_json`` wrote."""
        raw = json.loads(text)
        return RankPlan(raw["rank"], raw["world"], tuple(_group_from(entry) for entry in raw["groups"]))

    def digest(self) -> str:
        """A hash of the plan that is the same in every process."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def describe(self, slices: Sequence[Slice]) -> str:
        """The plan as text, one line per group: for people."""
        lines = [f"rank {self.rank} of {self.world}: receives {self.received_bytes} bytes, sends {self.sent_bytes}"]
        for group in self.groups:
            first = slices[group.slices[0]]
            more = f" and {len(group.slices) - 1} alike" if len(group.slices) > 1 else ""
            sources = ", ".join(f"{move.box} from {move.peer}" for move in group.receives) or "nothing"
            lines.append(f"  {first.name}{more}: needs {group.needed}, copies {group.local}, receives {sources}")
        return "\n".join(lines)


def permuted_order(world: int, tp: int) -> tuple[int, ...]:
    """Ranks in shard order: shard ``s(r) = (r mod tp) world/tp + r div tp`` belongs to rank r.

    With it, every FSDP shard of a column-parallel weight lies inside the generation slice of its own rank.

    Raises:
        ConfigError: when tp does not divide the world.
    """
    if tp < 1 or world % tp:
        raise ConfigError(f"generation tp={tp} does not divide {world} training ranks")
    order = [0] * world
    for rank in range(world):
        order[(rank % tp) * (world // tp) + rank // tp] = rank
    return tuple(order)


def plan_rank(slices: Sequence[Slice], rank: int, *, ranks_per_node: int | None = None) -> RankPlan:
    """The plan of one rank; all ranks that call it with the same slices find plans that fit together.

    Raises:
        EngineError: when the owners of a slice do not cover what this rank needs.
    """
    groups: dict[tuple[int, int, str], list[int]] = {}
    for index, piece in enumerate(slices):
        groups.setdefault((id(piece.owned), id(piece.needed), piece.dtype), []).append(index)
    node = (lambda r: 0) if ranks_per_node is None else (lambda r: r // ranks_per_node)
    plans = tuple(_plan_group(slices[members[0]], tuple(members), rank, node) for members in groups.values())
    world = len(slices[0].owned) if slices else 1
    return RankPlan(rank, world, plans)


def tables_digest(slices: Sequence[Slice]) -> str:
    """A hash of both layouts over all ranks, the same in every process."""
    tables: dict[int, int] = {}
    state = hashlib.sha256()
    for piece in slices:
        for table in (piece.owned, piece.needed):
            if id(table) not in tables:
                tables[id(table)] = len(tables)
                state.update(repr(table).encode())
        numbers = tables[id(piece.owned)], tables[id(piece.needed)]
        state.update(repr((piece.name, piece.slot, piece.dtype, numbers)).encode())
    return state.hexdigest()


def bound_bytes(slices: Sequence[Slice], rank: int) -> int:
    """What ``rank`` receives, without making its plan."""
    return sum(
        piece.itemsize * (volume(piece.needed[rank]) - volume(intersect(piece.owned[rank], piece.needed[rank])))
        for piece in slices
    )


def ideal_bytes(slices: Sequence[Slice], rank: int) -> int:
    """What ``rank`` would receive if all it owns were part of what it needs: held minus owned, at least 0.

    For evenly sharded weights this is the closed form ``M (1/t - 1/N)``. Replicated blocks make it larger than that.
    """
    held = sum(piece.itemsize * volume(piece.needed[rank]) for piece in slices)
    owned = sum(piece.itemsize * volume(piece.owned[rank]) for piece in slices if piece.slot == 0)
    return max(0, held - owned)


def intern(tables: Mapping[Any, BoxTable]) -> dict[Any, BoxTable]:
    """The same tables, with equal ones made one object."""
    known: dict[BoxTable, BoxTable] = {}
    return {key: known.setdefault(table, table) for key, table in tables.items()}


class _Owners:
    """Who owns which block of a slice, and who serves whom."""

    def __init__(self, piece: Slice, node: Any) -> None:
        self.by_box: dict[Box, list[int]] = {}
        for rank, box in enumerate(piece.owned):
            if volume(box):
                assert box is not None
                self.by_box.setdefault(box, []).append(rank)
        self.ordinal = {box: at for at, box in enumerate(self.by_box)}
        self.node = node
        self.by_need: dict[Box, list[int]] = {}
        for rank, box in enumerate(piece.needed):
            if volume(box):
                assert box is not None
                self.by_need.setdefault(box, []).append(rank)
        self.need_ordinal = {box: at for at, box in enumerate(self.by_need)}
        self._places: dict[tuple[Box, Box], dict[int, int]] = {}

    def server(self, block: Box, need: Box, target: int) -> int:
        """The owner of ``block`` that gives ``target`` its part of ``need``."""
        owners = self.by_box[block]
        if len(owners) == 1:
            return owners[0]
        places = self._places.get((block, need))
        if places is None:
            places = self._places[block, need] = self._serve(block, need)
        return places[target]

    def _serve(self, block: Box, need: Box) -> dict[int, int]:
        """Server of every rank with this need: itself, else its machine's owners in turn, else all owners in turn."""
        owners = self.by_box[block]
        own = set(owners)
        by_node: dict[int, list[int]] = {}
        for rank in owners:
            by_node.setdefault(self.node(rank), []).append(rank)
        turns: dict[int, int] = {}
        servers = {}
        offset = self.ordinal[block] + self.need_ordinal[need]
        for target in self.by_need[need]:
            if target in own:
                servers[target] = target
                continue
            where = self.node(target)
            near = by_node.get(where)
            key = where if near is not None else -1
            turn = turns.get(key, 0)
            turns[key] = turn + 1
            choice = near if near is not None else owners
            servers[target] = choice[(turn + offset) % len(choice)]
        return servers


def _plan_group(piece: Slice, members: tuple[int, ...], rank: int, node: Any) -> GroupPlan:
    """One rank's part of the group that ``piece`` stands for."""
    owners = _Owners(piece, node)
    owned, needed = piece.owned[rank], piece.needed[rank]
    sends, receives, covered = [], [], 0
    local = None
    if volume(needed):
        assert needed is not None
        for block in owners.by_box:
            common = intersect(block, needed)
            if common is None:
                continue
            covered += volume(common)
            source = owners.server(block, needed, rank)
            if source == rank:
                local = common
            else:
                receives.append(Move(source, common))
        if covered != volume(needed):
            raise EngineError(
                f"{piece.name}: rank {rank} needs {needed} {extents(needed)}, but the trainer's blocks cover "
                f"{covered} of {volume(needed)} elements (blocks {sorted(owners.by_box)[:8]})"
            )
    if volume(owned):
        assert owned is not None
        for need, targets in owners.by_need.items():
            common = intersect(owned, need)
            if common is None:
                continue
            others = (target for target in targets if target != rank)
            sends += [Move(target, common) for target in others if owners.server(owned, need, target) == rank]
    receives.sort(key=lambda move: (move.peer, move.box))
    sends.sort(key=lambda move: (move.peer, move.box))
    return GroupPlan(members, piece.itemsize, owned, needed, tuple(sends), tuple(receives), local)


def _group_from(raw: Mapping[str, Any]) -> GroupPlan:
    """A group from its JSON form."""

    def box(value: Any) -> Box | None:
        return None if value is None else tuple((low, high) for low, high in value)

    def moves(value: Any) -> tuple[Move, ...]:
        return tuple(Move(entry["peer"], box(entry["box"]) or ()) for entry in value)

    return GroupPlan(
        slices=tuple(raw["slices"]),
        itemsize=raw["itemsize"],
        owned=box(raw["owned"]),
        needed=box(raw["needed"]),
        sends=moves(raw["sends"]),
        receives=moves(raw["receives"]),
        local=box(raw["local"]),
    )
