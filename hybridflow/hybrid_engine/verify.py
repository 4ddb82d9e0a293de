"""Whether the generator holds what the trainer owns: checksums per block, in one pass, without gathering a parameter.

The checksum of a block is a sum over its elements, exact in integers modulo 2**64,

    sum_i bits(i) * weight(i),      bits: the element's bit pattern in the generator's dtype,
                                    weight: the product of hashes of its coordinates in the *full* parameter.

Sums over disjoint blocks add up, so each trainer rank sums its own blocks' overlap with every generator slice, one
all-reduce makes the totals, and each generator rank compares its storage with them. Weights depend on position, so
slices that changed places (or a block from another rank) give another sum; a stale block does too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.hybrid_engine.boxes import Box, extents, intersect, volume, within
from hybridflow.hybrid_engine.plan import Slice

_ELEMENTS_AT_ONCE = 1 << 18
"""Elements summed at once: bounds the int64 temporaries (2 MiB each)."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd multipliers with well spread bits, as signed integers: the golden ratio and two constants of a 64-bit finaliser.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
_SALT_DIM = 16
"""A dim that no parameter has, for the hash that tells parameters apart."""


def checksum(values: Tensor, box: Box, salt: int = 0, dtype: torch.dtype | None = None) -> int:
    """Checksum of ``values``, which hold ``box`` of a parameter; in [-2**63, 2**63).

    Equal for equal bits at equal positions; additive over disjoint boxes. ``salt`` tells parameters apart.
    With a ``dtype``, the checksum of the values cast to it, cast chunk by chunk.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part, part_box in _chunks(values, box):
        cast = part.to(dtype or part.dtype).contiguous()
        sums = cast.view(_INTEGERS[cast.element_size()]).to(torch.int64)
        for dim in reversed(range(len(part_box))):
            sums = (sums * _hashes(part_box[dim], dim, values.device)).sum(-1)
        total += sums
    total *= int(_hashes((salt, salt + 1), _SALT_DIM, torch.device("cpu")))
    return int(total)


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums of one rank."""

    entries: tuple[tuple[int, Box], ...]
    """(slice index, distinct needed box), the same on every rank."""
    owned: Tensor
    """``[entries]`` int64: this rank's share of what the trainer owns of them."""
    held: dict[int, tuple[int, int]]
    """Slice index -> (entry, checksum of this rank's generator storage)."""


def checksums(
    slices: Sequence[Slice], sources: Mapping[str, Tensor], targets: Sequence[Tensor | None], *, rank: int
) -> Sums:
    """This rank's checksums of both sides. Local.

    Of the ranks that own the same training block, the lowest one sums it.
    """
    entries = tuple((index, box) for index, piece in enumerate(slices) for box in _distinct(piece.needed))
    entry_of = {entry: at for at, entry in enumerate(entries)}
    owned = torch.zeros(len(entries), dtype=torch.int64)
    held = {}
    for index, piece in enumerate(slices):
        block, dtype = piece.owned[rank], getattr(torch, piece.dtype)
        if volume(block) and piece.owned.index(block) == rank:
            assert block is not None
            for need in _distinct(piece.needed):
                common = intersect(block, need)
                if common is not None:
                    values = sources[piece.name][within(common, block)]
                    owned[entry_of[index, need]] = checksum(values, common, salt=index, dtype=dtype)
        needed, target = piece.needed[rank], targets[index]
        if volume(needed) and target is not None:
            assert needed is not None
            held[index] = entry_of[index, needed], checksum(target, needed, salt=index)
    return Sums(entries, owned, held)


def differences(
    slices: Sequence[Slice], sums: Sums, *, rank: int, group: dist.ProcessGroup | None, device: torch.device
) -> list[str]:
    """One line for each of this rank's generator blocks that differs from the trainer's. Collective.

    ``device`` is where collectives of ``group`` expect tensors.
    """
    expected = sums.owned
    if group is not None:
        expected = expected.to(device)
        dist.all_reduce(expected, group=group)  # int64 wraps: a sum modulo 2**64
    totals = expected.tolist()
    return [
        f"{slices[index].name} {slices[index].needed[rank]} on generator rank {rank}: checksum {found & MASK:016x}, "
        f"the trainer's is {totals[entry] & MASK:016x}"
        for index, (entry, found) in sums.held.items()
        if totals[entry] != found
    ]


MASK = (1 << 64) - 1
"""Shows a checksum as an unsigned number."""


def _hashes(span: tuple[int, int], dim: int, device: torch.device) -> Tensor:
    """An odd hash of every coordinate of ``span`` on ``dim`` (int64, wrapping)."""
    mixed = torch.arange(*span, dtype=torch.int64, device=device) + (dim << 48)
    mixed *= _GOLDEN
    mixed ^= mixed >> 29
    mixed *= _MIX_1
    mixed ^= mixed >> 32
    mixed *= _MIX_2
    mixed ^= mixed >> 31
    return mixed | 1


def _chunks(values: Tensor, box: Box) -> Iterator[tuple[Tensor, Box]]:
    """Cuts along the first dim, each of a bounded number of elements (at least one row)."""
    if not box or values.numel() <= _ELEMENTS_AT_ONCE:
        if values.numel():
            yield values, box
        return
    low, high = box[0]
    rows = max(1, _ELEMENTS_AT_ONCE // prod(extents(box)[1:]))
    for start in range(low, high, rows):
        stop = min(start + rows, high)
        yield values[start - low : stop - low], ((start, stop), *box[1:])


def _distinct(table: Sequence[Box | None]) -> list[Box]:
    """Distinct boxes of a table, in order of rank."""
    return list(dict.fromkeys(box for box in table if volume(box) and box is not None))
