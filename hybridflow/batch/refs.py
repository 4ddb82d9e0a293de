"""Columns that stay where they were produced: which rows of which kept objects a column is made of.

    producer   object = bytes of a few columns of consecutive rows, kept by its process
    driver     column = blocks (object, offset, shape) and a place per row: (block, row in it)
    consumer   reads the objects that hold its rows, and nothing else

Rows are picked, repeated and joined by their places alone; only ``RemoteColumn.fetch`` reads bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]

OBJECT_BYTES = 1 << 20
"""Size up to which rows and columns share an object: smaller ones cost more messages, larger ones more over-fetch."""


class Kept(ABC):
    """Bytes that a process keeps for as long as the driver holds this reference.

    Args:
        token: what finds them again; its type is the store's business.
        size: how many.
        owner: who keeps them, for errors.
    """

    def __init__(self, token: Any, size: int, owner: str) -> None:
        self.token = token
        self.size = size
        self.owner = owner

    @abstractmethod
    def read(self) -> Bytes:
        """The bytes, not to be written to.

        Raises:
            LostError: who kept them is gone; names it.
        """

    def read_with(self, others: Sequence[Kept]) -> list[Bytes]:
        """The bytes of this object and of others of its kind, in one go where the store can do that."""
        return [kept.read() for kept in (self, *others)]


class Store(Protocol):
    """Where a process keeps objects, and finds those of others."""

    def put(self, data: Bytes) -> Kept:
        """A reference to ``data``, which is kept from now on."""
        ...

    def open(self, token: Any, size: int, owner: str) -> Kept:
        """The reference that arrived as these values."""
        ...


class Reader:
    """Reads each object once, and counts."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.needed_bytes = 0
        self._seen: dict[Kept, Bytes] = {}

    def read(self, kept: Kept) -> Bytes:
        """The bytes of an object."""
        self.read_all([kept])
        return self._seen[kept]

    def read_all(self, objects: Iterable[Kept]) -> None:
        """Reads what is not read yet; one go for each kind."""
        kinds: dict[type[Kept], list[Kept]] = {}
        for kept in dict.fromkeys(objects):
            if kept not in self._seen:
                kinds.setdefault(type(kept), []).append(kept)
        for alike in kinds.values():
            self._seen.update(zip(alike, alike[0].read_with(alike[1:]), strict=True))
            self.read_bytes += sum(kept.size for kept in alike)

    @property
    def over_fetched_bytes(self) -> int:
        """Bytes that were read beyond the rows and columns that were asked for."""
        return max(0, self.read_bytes - self.needed_bytes)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of one column inside a kept object."""

    kept: Kept
    offset: int
    """First byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Rows, then the shape of one row."""

    def take(self, rows: Tensor, reader: Reader) -> Tensor:
        """A copy of the rows at these positions."""
        count, *row = self.shape
        row_bytes = math.prod(row) * self.dtype.itemsize
        if not row_bytes or not len(rows):
            return torch.empty((len(rows), *row), dtype=self.dtype)
        places = rows.numpy()
        reader.needed_bytes += row_bytes * len(np.unique(places))
        table = reader.read(self.kept)[self.offset : self.offset + count * row_bytes].reshape(count, row_bytes)
        return torch.from_numpy(table.take(places, axis=0)).view(self.dtype).reshape(len(rows), *row)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where each row of a column is; columns that were produced together share one."""

    block: Tensor
    """``[B]`` int32: number of its block; -1: nowhere, the row is all zeros."""
    row: Tensor
    """``[B]`` int32: position inside the block."""

    def pick(self, positions: Tensor) -> tuple[Places, list[int]]:
        """Places of the rows at ``positions``, and the numbers of the blocks that they need, which are renumbered."""
        block, row = self.block[positions], self.row[positions]
        used = block.unique()
        used = used[used >= 0]
        blocks = int(self.block.max()) + 1 if len(self.block) else 0
        number = torch.full((blocks + 1,), -1, dtype=torch.int32)  # the last entry is what -1 finds
        number[used.long()] = torch.arange(len(used), dtype=torch.int32)
        return Places(number[block.long()], row), used.tolist()


@dataclass(frozen=True, slots=True, eq=False)
class RemoteColumn:
    """A tensor column whose rows are elsewhere; immutable."""

    blocks: tuple[Block, ...]
    places: Places
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one row. Blocks may be narrower in its first dimension: they are filled on the right."""

    def __len__(self) -> int:
        return len(self.places.block)

    def pick(self, positions: Tensor, known: dict[Places, tuple[Places, list[int]]]) -> RemoteColumn:
        """The rows at ``positions``. ``known`` is shared by the columns of one batch, so that places stay shared."""
        if self.places not in known:
            known[self.places] = self.places.pick(positions)
        places, used = known[self.places]
        return replace(self, blocks=tuple(self.blocks[number] for number in used), places=places)

    def cleared(self, start: int) -> RemoteColumn:
        """The column with zeros in all rows from ``start`` on."""
        block = self.places.block.clone()
        block[start:] = -1
        return replace(self, places=Places(block, self.places.row))

    def needs(self) -> list[Kept]:
        """Objects that hold its rows."""
        return [self.blocks[number].kept for number in self.places.block.unique().tolist() if number >= 0]

    def fetch(self, reader: Reader, fill: float = 0) -> Tensor:
        """The values, ``[B, ...]``; ``fill`` stands to the right of narrower blocks."""
        reader.read_all(self.needs())
        found = torch.full((len(self), *self.shape), fill, dtype=self.dtype)
        found[self.places.block < 0] = 0
        for number, block in enumerate(self.blocks):
            mine = (self.places.block == number).nonzero().squeeze(1)
            values = block.take(self.places.row[mine].long(), reader)
            if values.shape == found.shape:  # all rows are in this block, in their order
                return values
            found[mine, : block.shape[1]] = values
        return found

    def is_same(self, other: RemoteColumn) -> bool:
        """Whether both are the same rows of the same objects; False says nothing about their values."""
        return self.blocks == other.blocks and (
            self.places is other.places
            or (torch.equal(self.places.block, other.places.block) and torch.equal(self.places.row, other.places.row))
        )


def joinable(columns: Sequence[Any]) -> bool:
    """Whether ``join`` takes them: all are remote, of one dtype, and differ at most in the first dimension of a row."""
    kinds = {(c.dtype, len(c.shape), c.shape[1:]) if isinstance(c, RemoteColumn) else None for c in columns}
    return len(kinds) == 1 and None not in kinds


def join(columns: Sequence[RemoteColumn], known: dict[tuple[Places, ...], Places]) -> RemoteColumn:
    """The rows of all columns in order, as wide as the widest. ``known`` is shared by the columns of one batch."""
    key = tuple(column.places for column in columns)
    if key not in known:
        starts = np.cumsum([0] + [len(column.blocks) for column in columns]).tolist()
        numbers = [
            torch.where(column.places.block < 0, -1, column.places.block + start).int()
            for column, start in zip(columns, starts, strict=False)
        ]
        known[key] = Places(torch.cat(numbers), torch.cat([column.places.row for column in columns]))
    first = columns[0]
    widest = max(columns, key=lambda column: column.shape[:1])
    blocks = tuple(block for column in columns for block in column.blocks)
    return RemoteColumn(blocks, known[key], first.dtype, widest.shape)


def may_stay(value: Tensor) -> bool:
    """Whether a column stays where it is: more than one number a row, in plain memory."""
    plain = value.device.type == "cpu" and value.layout == torch.strided and not value.requires_grad
    return plain and value.ndim >= 2 and not (value.is_quantized or value.is_conj() or value.is_neg())


def keep_columns(columns: Mapping[str, Tensor], store: Store) -> dict[str, RemoteColumn]:
    """References to columns of one row count (``may_stay``), whose bytes ``store`` keeps.

    All columns are cut at the same rows, so that they share their places.
    """
    rows = len(next(iter(columns.values()), ()))
    longest = max((value[:1].numel() * value.element_size() for value in columns.values()), default=0)
    step = max(1, OBJECT_BYTES // max(1, longest))
    index = torch.arange(rows, dtype=torch.int32)
    places = Places(index // step, index % step)
    blocks: dict[str, list[Block]] = {name: [] for name in columns}
    packing = _Packing(store, blocks)
    for start in range(0, rows, step):
        for name, value in columns.items():
            packing.add(name, value[start : start + step])
    packing.close()
    return {
        name: RemoteColumn(tuple(blocks[name]), places, value.dtype, tuple(value.shape[1:]))
        for name, value in columns.items()
    }


class _Packing:
    """Parts of columns, gathered into objects."""

    def __init__(self, store: Store, blocks: dict[str, list[Block]]) -> None:
        self._store = store
        self._blocks = blocks
        self._parts: list[tuple[str, Tensor, Bytes]] = []
        self._size = 0

    def add(self, name: str, part: Tensor) -> None:
        data = part.contiguous().reshape(-1).view(torch.uint8).numpy()
        if self._size + data.size > OBJECT_BYTES:
            self.close()
        self._parts.append((name, part, data))
        self._size += data.size

    def close(self) -> None:
        if not self._parts:
            return
        kept = self._store.put(np.concatenate([data for _, _, data in self._parts]))
        offset = 0
        for name, part, data in self._parts:
            self._blocks[name].append(Block(kept, offset, part.dtype, tuple(part.shape)))
            offset += data.size
        self._parts, self._size = [], 0
