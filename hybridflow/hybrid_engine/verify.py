"""Whether the generator holds what the trainer owns: checksums per block, in one pass, without gathering a parameter.

The checksum of a block is a sum over its elements, exact in integers modulo 2**64,

    sum_i bits(i) * weight(i),      bits: the element's bit pattern in the generator's dtype,
                                    weight: a hash of its row-major index in the *full* parameter.

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
"""Elements hashed at once: bounds the int64 temporaries (2 MiB each)."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd multipliers with well spread bits, as signed integers: the golden ratio and two constants of a 64-bit finaliser.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def checksum(values: Tensor, box: Box, shape: Sequence[int], salt: int = 0) -> int:
    """Checksum of ``values``, which hold ``box`` of a parameter of ``shape``; in [-2**63, 2**63).

    Equal for equal bits at equal positions; additive over disjoint boxes. ``salt`` tells parameters apart.
    """
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part, part_box in _chunks(values, box):
        index = torch.full((), salt << 40, dtype=torch.int64, device=values.device)
        for dim, (low, high) in enumerate(part_box):
            along = torch.arange(low, high, dtype=torch.int64, device=values.device) * strides[dim]
            index = index + along.view([-1 if at == dim else 1 for at in range(len(part_box))])
        bits = part.contiguous().view(_INTEGERS[part.element_size()]).to(torch.int64)
        total += (bits * _weights(index)).sum()
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
        shape = _full_shape(piece)
        block, dtype = piece.owned[rank], getattr(torch, piece.dtype)
        if volume(block) and piece.owned.index(block) == rank:
            assert block is not None
            for need in _distinct(piece.needed):
                common = intersect(block, need)
                if common is not None:
                    values = sources[piece.name][within(common, block)].to(dtype)
                    owned[entry_of[index, need]] = checksum(values, common, shape, salt=index)
        needed, target = piece.needed[rank], targets[index]
        if volume(needed) and target is not None:
            assert needed is not None
            held[index] = entry_of[index, needed], checksum(target, needed, shape, salt=index)
    return Sums(entries, owned, held)


def differences(slices: Sequence[Slice], sums: Sums, *, rank: int, group: dist.ProcessGroup | None) -> list[str]:
    """One line for each of this rank's generator blocks that differs from the trainer's. Collective."""
    expected = sums.owned
    if group is not None:
        expected = expected.to(_device_of(group))
        dist.all_reduce(expected, group=group)  # int64 wraps: a sum modulo 2**64
    totals = expected.tolist()
    return [
        f"{slices[index].name} {slices[index].needed[rank]} on generator rank {rank}: checksum {found & _MASK:016x}, "
        f"the trainer's is {totals[entry] & _MASK:016x}"
        for index, (entry, found) in sums.held.items()
        if totals[entry] != found
    ]


_MASK = (1 << 64) - 1


def _weights(index: Tensor) -> Tensor:
    """A hash of every index (int64, wrapping)."""
    mixed = index * _GOLDEN
    mixed ^= mixed >> 29
    mixed *= _MIX_1
    mixed ^= mixed >> 32
    mixed *= _MIX_2
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


def _full_shape(piece: Slice) -> tuple[int, ...]:
    """Shape that the owned boxes span."""
    boxes = [box for box in piece.owned if box is not None]
    return tuple(max(box[dim][1] for box in boxes) for dim in range(len(boxes[0])))


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where collectives of ``group`` expect tensors."""
    backend = dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
