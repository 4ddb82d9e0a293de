"""What the trainer owns against what the generator holds: the same parameters, whole, in the same shapes, or an error.

Pure: reports of all ranks in, slices (``plan.Slice``) or one error that names everything wrong out. Every rank judges
the same reports, so all raise or none does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from hybridflow.hybrid_engine.boxes import Box, BoxTable, extents, volume
from hybridflow.hybrid_engine.plan import Slice, intern
from hybridflow.utils.errors import EngineError


@dataclass(frozen=True, slots=True)
class Block:
    """What one rank says about one tensor, of either side."""

    name: str
    """Hugging Face name."""
    box: Box
    """Range of the full parameter that it holds."""
    shape: tuple[int, ...]
    """Full shape of the parameter."""
    stored: tuple[int, ...]
    """Shape of the tensor itself."""
    dtype: str
    itemsize: int


Blocks = Sequence[Sequence[Block]]
"""By rank."""


def match(owned: Blocks, held: Blocks, *, tied: Mapping[str, str], dtype: torch.dtype | None = None) -> list[Slice]:
    """Slices of all parameters, in the trainer's order.

    Args:
        owned: training blocks by rank.
        held: generation blocks by rank.
        tied: other name -> name of shared parameters; both sides may use either.
        dtype: what generation blocks should store (float32 beside it is allowed); None: any.

    Raises:
        EngineError: naming every missing, extra, mis-shaped, incomplete or wrongly stored parameter, with both shapes.
    """
    trained, generated = _by_name(owned, tied), _by_name(held, tied)
    problems = [
        *_doubled(owned, tied),
        *(_missing(name, blocks) for name, blocks in generated.items() if name not in trained),
        *(_extra(name, blocks) for name, blocks in trained.items() if name not in generated),
        *chain.from_iterable(_ill_stored("trainer", rank, blocks) for rank, blocks in enumerate(owned)),
        *chain.from_iterable(_ill_stored("generator", rank, blocks) for rank, blocks in enumerate(held)),
        *chain.from_iterable(_misfits(name, trained[name], generated[name]) for name in trained if name in generated),
        *_wrong_dtypes(held, dtype),
    ]
    if problems:
        raise EngineError("trainer and generator do not fit; nothing was written\n" + "\n".join(problems))
    return _slices(owned, held, list(trained), tied)


def _by_name(blocks: Blocks, tied: Mapping[str, str]) -> dict[str, list[tuple[int, Block]]]:
    """(rank, block) by canonical name, in order of appearance."""
    found: dict[str, list[tuple[int, Block]]] = {}
    for rank, of_rank in enumerate(blocks):
        for block in of_rank:
            found.setdefault(tied.get(block.name, block.name), []).append((rank, block))
    return found


def _doubled(owned: Blocks, tied: Mapping[str, str]) -> list[str]:
    """Training parameters that a rank lists twice."""
    lines = []
    for rank, blocks in enumerate(owned):
        counts = Counter(tied.get(block.name, block.name) for block in blocks)
        for name, count in counts.items():
            if count > 1:
                names = sorted({block.name for block in blocks if tied.get(block.name, block.name) == name})
                lines.append(
                    f"doubled: trainer rank {rank} lists {name} {count} times ({', '.join(names)}); ties go once"
                )
    return lines


def _missing(name: str, blocks: Sequence[tuple[int, Block]]) -> str:
    return f"missing: the generator needs {name} {list(blocks[0][1].shape)}, which the trainer does not own"


def _extra(name: str, blocks: Sequence[tuple[int, Block]]) -> str:
    return f"extra: the trainer owns {name} {list(blocks[0][1].shape)}, for which the generator has no storage"


def _ill_stored(side: str, rank: int, blocks: Sequence[Block]) -> list[str]:
    """Blocks whose tensor is not of their box's shape, or whose box leaves the parameter."""
    lines = []
    for block in blocks:
        inside = len(block.box) == len(block.shape) and all(
            0 <= low <= high <= length for (low, high), length in zip(block.box, block.shape, strict=True)
        )
        if not inside:
            lines.append(f"shape: {side} rank {rank} says {block.name} {list(block.shape)} holds the box {block.box}")
        elif extents(block.box) != block.stored and volume(block.box) + _elements(block.stored) > 0:
            lines.append(
                f"shape: {side} rank {rank} stores {block.name} as {list(block.stored)}, "
                f"but its box {block.box} has the shape {list(extents(block.box))}"
            )
    return lines


def _misfits(name: str, trained: Sequence[tuple[int, Block]], generated: Sequence[tuple[int, Block]]) -> list[str]:
    """What is wrong between the two sides of one parameter."""
    train_shapes = sorted({block.shape for _, block in trained})
    rollout_shapes = sorted({block.shape for _, block in generated})
    if train_shapes != rollout_shapes or len(train_shapes) > 1:
        line = (
            f"shape: {name} is {_shapes(train_shapes)} in the trainer and {_shapes(rollout_shapes)} in the generator "
            f"(trainer rank {trained[0][0]} holds {trained[0][1].box}, "
            f"generator rank {generated[0][0]} holds {generated[0][1].box})"
        )
        return [line]
    lines = []
    whole = volume(tuple((0, length) for length in train_shapes[0]))
    for side, blocks in (("trainer", trained), ("generator", generated)):
        boxes = {block.box for _, block in blocks}
        covered = sum(volume(box) for box in boxes)
        if covered != whole and not (side == "generator" and covered > whole):
            lines.append(
                f"incomplete: the {side}'s ranks hold {covered} of {whole} elements of {name} {list(train_shapes[0])}: "
                f"{sorted(boxes)[:4]}"
            )
    return lines


def _wrong_dtypes(held: Blocks, dtype: torch.dtype | None) -> list[str]:
    """Parts that store another dtype than agreed."""
    if dtype is None:
        return []
    allowed = {str(dtype).removeprefix("torch."), "float32"}
    wrong = sorted({(block.name, block.dtype) for of_rank in held for block in of_rank if block.dtype not in allowed})
    return [f"dtype: the generator stores {name} as {stored}, not {dtype}" for name, stored in wrong]


def _slices(owned: Blocks, held: Blocks, names: Sequence[str], tied: Mapping[str, str]) -> list[Slice]:
    """Slices with interned tables."""
    world = len(owned)
    owned_boxes: dict[str, list[Box | None]] = {name: [None] * world for name in names}
    for rank, blocks in enumerate(owned):
        for block in blocks:
            owned_boxes[tied.get(block.name, block.name)][rank] = block.box if volume(block.box) else None
    needed_boxes: dict[tuple[str, int], list[Box | None]] = {}
    dtypes: dict[tuple[str, int], Block] = {}
    for rank, blocks in enumerate(held):
        taken: Counter[str] = Counter()
        for block in blocks:
            name = tied.get(block.name, block.name)
            key = (name, taken[name])
            taken[name] += 1
            needed_boxes.setdefault(key, [None] * world)[rank] = block.box if volume(block.box) else None
            known = dtypes.setdefault(key, block)
            if known.dtype != block.dtype:
                raise EngineError(f"dtype: generator ranks store {name} as {known.dtype} and as {block.dtype}")
    tables: dict[tuple[str, int], BoxTable] = intern(
        {
            **{(name, -1): tuple(boxes) for name, boxes in owned_boxes.items()},
            **{key: tuple(boxes) for key, boxes in needed_boxes.items()},
        }
    )
    order = {name: at for at, name in enumerate(names)}
    keys = sorted(needed_boxes, key=lambda key: (order[key[0]], key[1]))
    return [
        Slice(name, slot, dtypes[name, slot].dtype, dtypes[name, slot].itemsize, tables[name, -1], tables[name, slot])
        for name, slot in keys
    ]


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    """Shapes as text."""
    return " or ".join(str(list(shape)) for shape in shapes)


def _elements(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return volume(tuple((0, length) for length in shape))
