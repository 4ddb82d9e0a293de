"""Runs a plan: packed slices in rounds of fixed-size buckets, straight into their storage.

    fill a bucket (cast, packed by receiver) -> wire (``wires.py``) -> write what arrived

``bucket_bytes`` bounds what a rank sends and receives in a round, together, so a publish never needs more than two
buckets of extra memory. Blocks that a rank already owns are copied in place and touch no bucket.

All ranks must cut their plans into the same rounds, though each knows only its own plan. The rule: for every group of
slices, and for 1, 2, 4, ... cuts of it, each rank says how many bytes one cut moves here at most; the maximum over
ranks (one all-reduce) is what the group weighs, and everyone fills rounds by these weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.hybrid_engine.boxes import Box, extents, longest_length, split, volume, within
from hybridflow.hybrid_engine.plan import GroupPlan, RankPlan, Slice
from hybridflow.hybrid_engine.wires import Collective, RoundWork, Shared, Tries, Wire, choose_wire, find_seats
from hybridflow.utils.errors import EngineError

_CUTS = tuple(1 << power for power in range(31))
"""Numbers of pieces that a group may be cut into."""


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of one slice, as an index into the tensor that stores it."""

    peer: int
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    elements: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a group that moves in one go: the same for each of the group's slices."""

    sends: tuple[_Block, ...]
    receives: tuple[_Block, ...]
    local: tuple[tuple[slice, ...], tuple[slice, ...]] | None
    """Index in the training block, index in the generation block."""


@dataclass(frozen=True, slots=True)
class Round:
    """One all-to-all: pieces of slices that share a dtype."""

    items: tuple[tuple[int, _Piece], ...]
    """Slice index and piece, in the order all ranks agree on."""
    itemsize: int
    sent: tuple[int, ...]
    """Bytes to every rank."""
    received: tuple[int, ...]
    """Bytes from every rank."""

    @property
    def bucket_bytes(self) -> int:
        """Bytes of bucket that this rank needs for it."""
        return sum(self.sent) + sum(self.received)


@dataclass(frozen=True, slots=True)
class Moved:
    """What one run did on this rank; counted where the bytes are handed to the collective."""

    received_bytes: int
    sent_bytes: int
    local_bytes: int
    rounds: int
    messages: int
    """Non-empty (round, peer) pairs sent."""
    bucket_bytes: int
    """Extra memory held at any moment: this rank's buckets."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of this thread by what it did: ``pack`` (cast and pack), ``copy`` (own blocks), ``wait`` (for peers and the
    wire), ``write``. On a GPU these are the times to launch the work, but for ``wait``."""


class Transport:
    """A plan made executable on this rank. Collective: all ranks of ``group`` build and run it together.

    Args:
        plan: this rank's plan.
        slices: what the plan was made of.
        group: process group whose rank i is rank i of the plan; None: a world of one.
        bucket_bytes: size of a bucket; at most two exist at a time.
        device: where buckets live (the generator's device).
        wire: ``collective`` or ``shared``; None: what fits where the ranks sit (``wires.choose_wire``).

    Raises:
        EngineError: when some single row of blocks does not fit a bucket; raised on all ranks.
    """

    def __init__(
        self,
        plan: RankPlan,
        slices: Sequence[Slice],
        *,
        group: dist.ProcessGroup | None,
        bucket_bytes: int,
        device: torch.device,
        wire: str | None = None,
    ) -> None:
        self._plan = plan
        self._slices = slices
        self._group = group
        self.wire = wire or ("collective" if group is None else choose_wire(find_seats(group, device), bucket_bytes))
        """How bytes travel."""
        self.device = torch.device("cpu") if self.wire == "shared" else device
        """Where collectives of the group expect tensors."""
        shared = self.wire == "shared"
        self._wire: Wire = Shared(group, device) if shared and group is not None else Collective(group, device)
        self._dtypes = [getattr(torch, piece.dtype) for piece in slices]
        self.rounds = self._cut(bucket_bytes)

    def run(self, sources: Mapping[str, Tensor], targets: Sequence[Tensor | None]) -> Moved:
        """Moves every slice once. Collective.

        A local failure does not leave the others waiting: this rank goes on with the collectives and raises at the end.
        A failure of a collective raises at once.

        Args:
            sources: training block of this rank by parameter name, shaped as its owned box.
            targets: generation block of this rank by slice index; None where it needs nothing.
        """
        tries = Tries()
        local_bytes = 0

        def copy(number: int) -> None:
            nonlocal local_bytes
            local_bytes += self._copy_local(self.rounds[number], sources, targets)

        work = RoundWork(
            fill=lambda number, bucket: self._fill(self.rounds[number], bucket, sources),
            copy=copy,
            empty=lambda number, arrived: self._empty(self.rounds[number], arrived, targets),
        )
        held = self._wire.move(self.rounds, work, tries)
        if tries.failures:
            raise tries.failures[0]
        return Moved(
            received_bytes=sum(sum(part.received) for part in self.rounds),
            sent_bytes=sum(sum(part.sent) for part in self.rounds),
            local_bytes=local_bytes,
            rounds=len(self.rounds),
            messages=sum(size > 0 for part in self.rounds for size in part.sent),
            bucket_bytes=held,
            seconds=dict(tries.seconds),
        )

    def _fill(self, part: Round, bucket: Tensor, sources: Mapping[str, Tensor]) -> None:
        """Packs what leaves this rank, ordered by receiver, cast to the generator's dtype."""
        ends = _starts(part.sent)
        for index, piece in part.items:
            if not piece.sends:
                continue
            source = sources[self._slices[index].name]
            for block in piece.sends:
                stop = ends[block.peer] + block.elements * part.itemsize
                room = bucket[ends[block.peer] : stop].view(self._dtypes[index]).view(block.shape)
                room.copy_(source[block.index])
                ends[block.peer] = stop

    def _empty(self, part: Round, arrived: Sequence[Tensor], targets: Sequence[Tensor | None]) -> None:
        """Writes what arrived, bytes by sender."""
        starts = [0] * self._plan.world
        for index, piece in part.items:
            if not piece.receives:
                continue
            target = _present(targets[index], self._slices[index])
            for block in piece.receives:
                stop = starts[block.peer] + block.elements * part.itemsize
                packed = arrived[block.peer][starts[block.peer] : stop]
                target[block.index].copy_(packed.view(self._dtypes[index]).view(block.shape))
                starts[block.peer] = stop

    def _copy_local(self, part: Round, sources: Mapping[str, Tensor], targets: Sequence[Tensor | None]) -> int:
        """Copies own blocks; bytes copied."""
        copied = 0
        for index, piece in part.items:
            if piece.local is None:
                continue
            source, target = piece.local
            view = _present(targets[index], self._slices[index])[target]
            view.copy_(sources[self._slices[index].name][source])
            copied += view.numel() * view.element_size()
        return copied

    def _cut(self, bucket_bytes: int) -> list[Round]:
        """The rounds of this rank; as many, with the same items, on every rank."""
        groups = self._plan.groups
        weights = torch.tensor([_weights(group) for group in groups], dtype=torch.int64)
        weights = weights.reshape(len(groups), len(_CUTS))
        if self._group is not None:
            weights = weights.to(self.device)
            dist.all_reduce(weights, op=dist.ReduceOp.MAX, group=self._group)
            weights = weights.cpu()
        rows = zip(groups, weights.tolist(), strict=True)
        cuts_of = [self._fitting_cuts(group, row, bucket_bytes) for group, row in rows]
        pieces: dict[tuple[int, int], _Piece] = {}
        rounds: list[Round] = []
        items: list[tuple[int, _Piece]] = []
        filled = 0
        for dtype, index, at in self._order():
            cuts, weight = cuts_of[at]
            for number in range(cuts):
                if items and (filled + weight > bucket_bytes or self._slices[items[-1][0]].dtype != dtype):
                    rounds.append(self._round(items))
                    items, filled = [], 0
                if (at, number) not in pieces:
                    pieces[at, number] = _piece(groups[at], cuts, number)
                items.append((index, pieces[at, number]))
                filled += weight
        if items:
            rounds.append(self._round(items))
        return rounds

    def _order(self) -> list[tuple[str, int, int]]:
        """(dtype, slice, group) of every slice: by dtype, then in the trainer's order."""
        group_of = {index: at for at, group in enumerate(self._plan.groups) for index in group.slices}
        return sorted((piece.dtype, index, group_of[index]) for index, piece in enumerate(self._slices))

    def _fitting_cuts(self, group: GroupPlan, weights: Sequence[int], bucket_bytes: int) -> tuple[int, int]:
        """The fewest cuts with which a piece of ``group`` fits a bucket everywhere, and what such a piece weighs."""
        for cuts, weight in zip(_CUTS, weights, strict=True):
            if weight <= bucket_bytes:
                return cuts, weight
        name = self._slices[group.slices[0]].name
        raise EngineError(
            f"{name}: one row to each of {self._plan.world} ranks takes {min(weights)} bytes, more than a bucket of "
            f"{bucket_bytes}; give larger buckets"
        )

    def _round(self, items: Sequence[tuple[int, _Piece]]) -> Round:
        """A round of these items, with this rank's byte counts."""
        itemsize = self._slices[items[0][0]].itemsize
        sent, received = [0] * self._plan.world, [0] * self._plan.world
        for _, piece in items:
            for block in piece.sends:
                sent[block.peer] += block.elements * itemsize
            for block in piece.receives:
                received[block.peer] += block.elements * itemsize
        return Round(tuple(items), itemsize, tuple(sent), tuple(received))


def _weights(group: GroupPlan) -> list[int]:
    """For every entry of ``_CUTS``: the most bytes that one piece of one slice then moves through this rank."""
    kinds: Counter[tuple[int, int]] = Counter()
    for move in (*group.sends, *group.receives):
        length = longest_length(move.box)
        kinds[length, volume(move.box) // length] += 1
    return [
        group.itemsize * sum(-(-length // cuts) * rest * count for (length, rest), count in kinds.items())
        for cuts in _CUTS
    ]


def _piece(group: GroupPlan, cuts: int, number: int) -> _Piece:
    """The ``number``-th of ``cuts`` pieces of a group's moves; own blocks are copied with the first."""

    def blocks(moves: Sequence[tuple[int, Box]], stored: Box | None) -> tuple[_Block, ...]:
        found = []
        for peer, box in moves:
            part = split(box, cuts, number)
            if part is not None and stored is not None:
                found.append(_Block(peer, within(part, stored), extents(part), volume(part)))
        return tuple(found)

    local = None
    if number == 0 and group.local is not None and group.owned is not None and group.needed is not None:
        local = within(group.local, group.owned), within(group.local, group.needed)
    return _Piece(
        sends=blocks([(move.peer, move.box) for move in group.sends], group.owned),
        receives=blocks([(move.peer, move.box) for move in group.receives], group.needed),
        local=local,
    )


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each rank's bytes start in a bucket."""
    starts, first = [], 0
    for size in sizes:
        starts.append(first)
        first += size
    return starts


def _present(target: Tensor | None, piece: Slice) -> Tensor:
    """The storage that must exist."""
    if target is None:
        raise EngineError(f"{piece.name}: the generator offers no storage for a slice that the plan sends here")
    return target
