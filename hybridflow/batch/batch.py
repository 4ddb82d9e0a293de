"""``Batch``: named columns with one row count, the only thing that roles hand to one another.

Tensor columns live in a tensordict; object columns (one Python value per row) in tuples beside it; wide tensor columns
may be references to where they were produced (batch/refs.py), which only reading fetches. A batch is never changed:
every method returns a new one that shares storage where it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridflow.batch.columns import pad_value
from hybridflow.batch.refs import Kept, Places, Reader, RemoteColumn, Store, join, joinable, keep_columns, may_stay
from hybridflow.utils.errors import ColumnError

Rows = Tensor | slice | Sequence[int]
Values = Tensor | RemoteColumn | Sequence[Any]


class Batch:
    """Immutable named columns of equal length.

    Args:
        columns: name to tensor ``[B, ...]``, to a reference to one, or to a sequence of B objects.

    Raises:
        ColumnError: when two columns disagree about B; the message names both.
    """

    __slots__ = ("_objects", "_remote", "_rows", "_tensors")

    def __init__(self, columns: Mapping[str, Values]) -> None:
        rows = _row_count(columns)
        tensors = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
        self._rows = rows
        self._tensors = TensorDict(tensors, batch_size=[rows])
        self._remote = {name: value for name, value in columns.items() if isinstance(value, RemoteColumn)}
        others = {name: value for name, value in columns.items() if not isinstance(value, Tensor | RemoteColumn)}
        self._objects: dict[str, tuple[Any, ...]] = {name: tuple(value) for name, value in others.items()}

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, name: str) -> bool:
        return name in self._objects or name in self._remote or name in self._tensors.keys()

    def __getitem__(self, name: str) -> Tensor:
        """The tensor column ``name``; a remote one is fetched each time it is read.

        Raises:
            LostError: the rank that kept it is gone.
        """
        if name in self._tensors.keys():
            return self._tensors[name]
        if name in self._remote:
            return self._remote[name].fetch(Reader(), pad_value(name))
        if name in self._objects:
            raise ColumnError(f"column {name!r} holds objects: read it with .objects({name!r})")
        raise ColumnError(f"no column {name!r}; this batch has {', '.join(sorted(self.names)) or 'none'}")

    def __repr__(self) -> str:
        shapes = [f"{name}{list(value.shape)}" for name, value in self._local().items()]
        shapes += [f"{name}{[self._rows, *value.shape]}(remote)" for name, value in self._remote.items()]
        return f"Batch({self._rows} rows: {', '.join(shapes + [f'{name}(object)' for name in self._objects])})"

    @property
    def names(self) -> tuple[str, ...]:
        """All column names, tensors first."""
        return (*map(str, self._tensors.keys()), *self._remote, *self._objects)

    def objects(self, name: str) -> tuple[Any, ...]:
        """The object column ``name``."""
        if name not in self._objects:
            raise ColumnError(f"no object column {name!r}; this batch has {', '.join(sorted(self._objects)) or 'none'}")
        return self._objects[name]

    def tensors(self) -> dict[str, Tensor]:
        """All tensor columns; remote ones are fetched."""
        return self.fetched()._local()

    def columns(self) -> dict[str, Values]:
        """All columns, remote ones as references."""
        return {**self._local(), **self._remote, **self._objects}

    def nbytes(self) -> int:
        """Bytes of the tensor columns that are here."""
        return sum(value.numel() * value.element_size() for value in self._local().values())

    def kept(self, store: Store) -> Batch:
        """This batch with its wide columns in ``store``."""
        wide = {name: value for name, value in self._local().items() if may_stay(value)}
        return self.with_columns(**keep_columns(wide, store)) if wide else self

    def fetched(self, reader: Reader | None = None) -> Batch:
        """This batch with all columns here; ``reader`` counts. The same object when nothing is remote.

        Raises:
            LostError: a rank that kept rows is gone.
        """
        if not self._remote:
            return self
        reader = reader or Reader()
        reader.read_all(kept for column in self._remote.values() for kept in column.needs())
        found = {name: column.fetch(reader, pad_value(name)) for name, column in self._remote.items()}
        return self.with_columns(**found)

    def readable(self, kind: type[Kept]) -> Batch:
        """This batch with all columns here but those whose objects are of ``kind``; the same object when all are."""
        foreign = [n for n, c in self._remote.items() if not all(isinstance(block.kept, kind) for block in c.blocks)]
        return self.with_columns(**{name: self[name] for name in foreign}) if foreign else self

    def cleared(self, start: int, *names: str) -> Batch:
        """This batch with zeros (False) in all rows from ``start`` on of the named tensor columns that it has."""
        remote = {name: value.cleared(start) for name, value in self._remote.items() if name in names}
        local = {name: value.clone() for name, value in self._local().items() if name in names}
        for value in local.values():
            value[start:] = 0
        return self.with_columns(**local, **remote)

    def merge(self, other: Batch) -> Batch:
        """Columns of both.

        Raises:
            ColumnError: when row counts differ, or one name has two unequal values.
        """
        mine, theirs = self.columns(), other.columns()
        for name in mine.keys() & theirs.keys():
            if not _equal(name, mine[name], theirs[name]):
                raise ColumnError(f"column {name!r} exists on both sides of a merge with unequal values")
        return Batch({**mine, **theirs})

    def with_columns(self, **columns: Values) -> Batch:
        """This batch with ``columns`` added or replaced."""
        return Batch({**self.columns(), **columns})

    def select(self, *names: str) -> Batch:
        """Only the named columns; a missing name raises ColumnError."""
        mine = self.columns()
        missing = [name for name in names if name not in mine]
        if missing:
            raise ColumnError(f"no column {missing[0]!r}; this batch has {', '.join(sorted(mine)) or 'none'}")
        return self._like({name: mine[name] for name in names})

    def drop(self, *names: str) -> Batch:
        """All but the named columns; names that are not there are ignored."""
        return self._like({name: value for name, value in self.columns().items() if name not in names})

    def rows(self, index: Rows) -> Batch:
        """The rows that ``index`` names (positions, a boolean mask or a slice), in that order."""
        positions = _positions(index, self._rows)
        picked = positions.tolist()
        objects = {name: tuple(value[i] for i in picked) for name, value in self._objects.items()}
        tensors = {name: value[positions] for name, value in self._local().items()}
        known: dict[Places, tuple[Places, list[int]]] = {}
        remote = {name: value.pick(positions, known) for name, value in self._remote.items()}
        return Batch({**tensors, **remote, **objects}) if self.names else empty(len(picked))

    def repeat(self, times: int) -> Batch:
        """Each row ``times`` times, copies next to one another."""
        return self.rows(torch.arange(self._rows).repeat_interleave(times))

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Consecutive blocks of the given row counts, which sum to ``len(self)``."""
        if sum(sizes) != self._rows:
            raise ColumnError(f"cannot split {self._rows} rows into blocks of {list(sizes)}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.rows(slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]

    def to(self, device: torch.device | str) -> Batch:
        """Tensor columns on ``device``."""
        return self._like({**{n: v.to(device) for n, v in self.tensors().items()}, **self._objects})

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        """Rows as dicts: numbers for ``[B]`` columns, tensors for wider ones, objects as they are."""
        tensors = self.tensors()
        for i in range(self._rows):
            row: dict[str, Any] = {n: v[i].item() if v.ndim == 1 else v[i] for n, v in tensors.items()}
            yield {**row, **{n: v[i] for n, v in self._objects.items()}}

    def _local(self) -> dict[str, Tensor]:
        return {str(name): self._tensors[name] for name in self._tensors.keys()}

    def _like(self, columns: Mapping[str, Values]) -> Batch:
        return Batch(columns) if columns else empty(self._rows)

    def __getstate__(self) -> _State:
        # A slice would drag its whole storage through the wire.
        tensors = {name: _own_storage(value) for name, value in self._local().items()}
        return self._rows, tensors, self._remote, self._objects

    def __setstate__(self, state: _State) -> None:
        self._rows, tensors, self._remote, self._objects = state
        self._tensors = TensorDict(tensors, batch_size=[self._rows])


_State = tuple[int, dict[str, Tensor], dict[str, RemoteColumn], dict[str, tuple[Any, ...]]]


def empty(rows: int) -> Batch:
    """A batch of ``rows`` rows without columns."""
    batch = Batch({"_": torch.zeros(rows)})
    batch._tensors = TensorDict({}, batch_size=[rows])
    return batch


def concat(batches: Sequence[Batch]) -> Batch:
    """Rows of all batches in order; narrower ``[B, T]`` blocks are padded on the right (batch/columns.py says how).

    Raises:
        ColumnError: when the batches do not have the same columns, or there are none.
    """
    if not batches:
        raise ColumnError("concat of no batches: the columns are unknown")
    if len(batches) == 1:
        return batches[0]
    names = set(batches[0].names)
    for other in batches[1:]:
        if set(other.names) != names:
            odd = sorted(names.symmetric_difference(other.names))
            raise ColumnError(f"concat of batches with different columns: {', '.join(odd)} not in all")
    parts = [batch.columns() for batch in batches]
    known: dict[tuple[Places, ...], Places] = {}
    columns = {name: _join(name, [part[name] for part in parts], known) for name in batches[0].names}
    return Batch(columns) if columns else empty(sum(len(batch) for batch in batches))


def _join(name: str, blocks: Sequence[Any], known: dict[tuple[Places, ...], Places]) -> Values:
    if joinable(blocks):
        return join(blocks, known)
    if not isinstance(blocks[0], Tensor | RemoteColumn):
        return [item for block in blocks for item in block]
    blocks = [_here(name, block) for block in blocks]
    if blocks[0].ndim < 2:
        return torch.cat(list(blocks))
    width = max(block.shape[1] for block in blocks)
    return torch.cat([_widen(block, width, pad_value(name)) for block in blocks])


def _here(name: str, column: Any) -> Any:
    return column.fetch(Reader(), pad_value(name)) if isinstance(column, RemoteColumn) else column


def _widen(block: Tensor, width: int, value: float) -> Tensor:
    if block.shape[1] == width:
        return block
    wide = block.new_full((block.shape[0], width, *block.shape[2:]), value)
    wide[:, : block.shape[1]] = block
    return wide


def _row_count(columns: Mapping[str, Any]) -> int:
    counts = {name: len(value) for name, value in columns.items()}
    if len(set(counts.values())) > 1:
        listing = ", ".join(f"{name}={count}" for name, count in counts.items())
        raise ColumnError(f"columns of one batch need one row count, got {listing}")
    if not counts:
        raise ColumnError("a batch needs at least one column; use empty(rows) for none")
    return next(iter(counts.values()))


def _positions(index: Rows, rows: int) -> Tensor:
    if isinstance(index, slice):
        return torch.arange(rows)[index]
    index = torch.as_tensor(index)
    if index.dtype == torch.bool:
        if len(index) != rows:
            raise ColumnError(f"a row mask of {len(index)} entries for {rows} rows")
        return index.nonzero().squeeze(1)
    return index.long()


def _own_storage(value: Tensor) -> Tensor:
    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
        return value.clone()
    return value


def _equal(name: str, mine: Any, theirs: Any) -> bool:
    if isinstance(mine, RemoteColumn) and isinstance(theirs, RemoteColumn) and mine.is_same(theirs):
        return True
    mine, theirs = _here(name, mine), _here(name, theirs)
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return type(mine) is type(theirs) and bool(mine == theirs)
