"""Blocks of a tensor as integer ranges, and how mesh axes cut them: no torch.

A *box* is one half-open range per dim, in the coordinates of the full Hugging Face parameter. Both sides of a reshard
are boxes in the same coordinates, so what one rank owes another is an intersection and nothing else.

    full parameter     trainer rank 1 owns      generator rank 0 needs      rank 1 sends rank 0
    [0, 8) x [0, 4)    [2, 4) x [0, 4)          [0, 8) x [0, 2)             [2, 4) x [0, 2)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

Box = tuple[tuple[int, int], ...]
"""Half-open range of every dim."""

BoxTable = tuple[Box | None, ...]
"""What each rank holds of one parameter, by rank; None (or a range without length): nothing."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """A mesh axis along which every rank holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A mesh axis that cuts a tensor dim into chunks of ``ceil(length / degree)``; the last may be short or empty."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """A mesh axis that cuts a tensor dim *after* later axes have cut it into ``split_factor`` parts.

    FSDP over tensor parallelism is written so: the dp axis stands first in the mesh, but cuts what tp has left.
    """

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard


def full_box(shape: Sequence[int]) -> Box:
    """The box that covers ``shape``."""
    return tuple((0, length) for length in shape)


def extents(box: Box) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(high - low for low, high in box)


def volume(box: Box | None) -> int:
    """Elements in a box; 0 for None. A box without dims (a scalar parameter) holds 1."""
    return 0 if box is None else prod(high - low for low, high in box)


def intersect(one: Box | None, other: Box | None) -> Box | None:
    """The common part of two boxes of the same parameter; None where they share nothing."""
    if one is None or other is None:
        return None
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return common if all(low < high for low, high in common) else None


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Index of ``inner`` in a tensor that stores ``outer``."""
    return tuple(slice(low - base, high - base) for (low, high), (base, _) in zip(inner, outer, strict=True))


def split(box: Box, pieces: int, piece: int) -> Box | None:
    """The ``piece``-th of ``pieces`` near-equal cuts along the longest dim; None where that piece is empty."""
    if pieces == 1:
        return box
    if not box:
        return box if piece == 0 else None
    lengths = extents(box)
    dim = lengths.index(max(lengths))
    low, length = box[dim][0], lengths[dim]
    start, stop = low + length * piece // pieces, low + length * (piece + 1) // pieces
    return None if start == stop else (*box[:dim], (start, stop), *box[dim + 1 :])


def longest_length(box: Box) -> int:
    """Entries of the longest dim: how many pieces ``split`` can make; 1 for a scalar."""
    return max(extents(box), default=1)


def chunk(span: tuple[int, int], degree: int, index: int) -> tuple[int, int]:
    """The ``index``-th range of ``span`` cut as ``torch.chunk`` and FSDP2 cut: full chunks, then short, then empty."""
    low, high = span
    size = -(-(high - low) // degree)
    return min(low + index * size, high), min(low + (index + 1) * size, high)


def local_box(shape: Sequence[int], axes: Iterable[tuple[int, int, Placement]]) -> Box:
    """The box of one rank, given ``(degree, coordinate, placement)`` of every mesh axis, outermost first.

    Raises:
        ValueError: when a strided axis names a split factor that no later axes give.
    """
    cuts: dict[int, list[tuple[int, int]]] = {}
    for degree, coordinate, placement in reversed(list(axes)):
        match placement:
            case Replicate():
                continue
            case Shard(dim):
                cuts.setdefault(dim, []).insert(0, (degree, coordinate))
            case StridedShard(dim, split_factor):
                later = cuts.setdefault(dim, [])
                counts = [prod(size for size, _ in later[:stop]) for stop in range(len(later) + 1)]
                if split_factor not in counts:
                    raise ValueError(f"{placement}: later axes cut dim {dim} into one of {counts} parts")
                later.insert(counts.index(split_factor), (degree, coordinate))
    box = list(full_box(shape))
    for dim, ordered in cuts.items():
        for degree, coordinate in ordered:
            box[dim] = chunk(box[dim], degree, coordinate)
    return tuple(box)
