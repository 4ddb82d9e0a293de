"""Transfer protocols: how one call of the controller becomes one call per rank, and their results one result.

    arguments -> distribute(layout) -> rank 0 .. rank n-1 -> collect(layout) -> result

A protocol is a pure pair over a ``ParallelDims``; no process and no tensor operation beyond slicing rows is in it. The
names follow HybridFlow (arXiv:2409.19256), Table 3. Rules that all splitting protocols share:

- Every ``Batch`` argument, positional or keyword, is cut into consecutive blocks of equal row count; all of a call have
  the same row count. Other arguments (also containers that hold batches) go to every rank as they are.
- Missing rows are filled with cyclic copies of real rows, after the last real row. A pad row has ``valid`` False and
  all-False masks, so that it enters no loss, metric or reward; it is cut off on collect and order is kept. Every block
  carries ``valid``, padded or not. A batch of no rows gives every rank a block of no rows.
- Results: a ``Batch`` is joined over the answering ranks in row order; a mapping, a number, a string or None is the
  first answering rank's (workers combine their metrics over ranks before they return); a tuple is collected entry by
  entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridflow.batch.batch import Batch, concat
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ColumnError, ConfigError, EngineError

MASKS = ("response_mask", "loss_mask")
"""Columns that are all False in a pad row."""
VALID = "valid"


@dataclass(frozen=True, slots=True)
class Arguments:
    """What one rank (or the caller) passes to a method."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def batches(self) -> dict[str, Batch]:
        """The Batch arguments by position or keyword, named for messages."""
        named = {f"argument {i}": value for i, value in enumerate(self.args)}
        named |= {f"argument {name!r}": value for name, value in self.kwargs.items()}
        return {name: value for name, value in named.items() if isinstance(value, Batch)}

    def map_batches(self, change: Callable[[Batch], Batch]) -> Arguments:
        """The same arguments with every Batch replaced by ``change(batch)``."""
        return Arguments(
            tuple(change(value) if isinstance(value, Batch) else value for value in self.args),
            {name: change(value) if isinstance(value, Batch) else value for name, value in self.kwargs.items()},
        )


Distribute = Callable[[ParallelDims, Arguments], Sequence[Arguments | None]]
"""(layout, the caller's arguments) -> arguments of every rank; None: this rank is not called."""
Collect = Callable[[ParallelDims, Sequence[Any], int | None], Any]
"""(layout, results by rank, rows of the caller's Batch arguments or None) -> the caller's result.

Ranks that were not called, or do not answer, stand as None.
"""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A protocol; users register their own with ``add_protocol`` or pass it to ``@register(dispatch=...)``."""

    distribute: Distribute
    collect: Collect
    answering: Callable[[ParallelDims], Sequence[int]] | None = None
    """Ranks whose results ``collect`` reads; the results of others stay where they are. None: every rank."""


def row_count(arguments: Arguments) -> int | None:
    """Rows of the Batch arguments; None when there are none.

    Raises:
        ColumnError: when two Batch arguments have different row counts; names both.
    """
    counts = {name: len(batch) for name, batch in arguments.batches().items()}
    if len(set(counts.values())) > 1:
        listing = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ColumnError(f"all batches of one call need one row count: {listing}")
    return next(iter(counts.values()), None)


def select_reads(arguments: Arguments, reads: Sequence[str] | None) -> Arguments:
    """The arguments with only the columns ``reads`` in their batches (and ``valid``); None keeps all.

    A name that ends in ``?`` travels when it is there.

    Raises:
        ColumnError: when no Batch argument has a column that ``reads`` asks for.
    """
    batches = arguments.batches()
    if reads is None or not batches:
        return arguments
    present = {name for batch in batches.values() for name in batch.names}
    missing = [name for name in reads if not name.endswith("?") and name not in present]
    if missing:
        raise ColumnError(f"no column {', '.join(map(repr, missing))}; the call has {', '.join(sorted(present))}")
    wanted = {name.rstrip("?") for name in reads} | {VALID}
    return arguments.map_batches(lambda batch: batch.select(*(name for name in batch.names if name in wanted)))


def check_writes(result: Any, writes: Sequence[str]) -> None:
    """Nothing when every column of ``writes`` is in the returned batches (a name with ``?`` may be absent).

    Raises:
        ColumnError: names the columns that did not come back.
    """
    if not writes:
        return
    parts = result if isinstance(result, tuple) else (result,)
    present = {name for part in parts if isinstance(part, Batch) for name in part.names}
    missing = [name for name in writes if not name.endswith("?") and name not in present]
    if missing:
        got = ", ".join(sorted(present)) or "no batch"
        raise ColumnError(f"column {', '.join(map(repr, missing))} promised by writes did not come back; got {got}")


def split_rows(batch: Batch, parts: int) -> list[Batch]:
    """``parts`` consecutive blocks of equal row count, padded as the module docstring says."""
    rows = len(batch)
    block = -(-rows // parts)
    padded = block * parts
    valid = batch[VALID] if VALID in batch else torch.ones(rows, dtype=torch.bool)
    batch = batch.with_columns(**{VALID: valid})
    if padded > rows:
        cyclic = torch.arange(padded)
        cyclic[rows:] = torch.arange(padded - rows) % rows
        batch = batch.rows(cyclic).cleared(rows, VALID, *MASKS)
    return batch.split([block] * parts)


def join(results: Sequence[Any], rows: int | None) -> Any:
    """One result of the answering ranks' results, by the rules of the module docstring.

    Raises:
        ColumnError: when a rank returned another number of rows than its block has.
        EngineError: when a value cannot be joined without losing what other ranks returned.
    """
    first = results[0]
    if isinstance(first, tuple):
        if any(not isinstance(result, tuple) or len(result) != len(first) for result in results):
            raise EngineError(f"ranks returned tuples of different lengths: {[_kind(result) for result in results]}")
        return tuple(join([result[i] for result in results], rows) for i in range(len(first)))
    if isinstance(first, Batch):
        return _join_batches(results, rows)
    if first is None or isinstance(first, Mapping | bool | int | float | str):
        return first
    raise EngineError(
        f"a splitting protocol collects batches, mappings, numbers, strings, None and tuples of these, got "
        f"{_kind(first)}: return one of them, or use ONE_TO_ALL or ALL_TO_ALL, which give one result per rank"
    )


def _join_batches(results: Sequence[Any], rows: int | None) -> Batch:
    if any(not isinstance(result, Batch) for result in results):
        raise EngineError(f"some ranks returned a Batch and others did not: {[_kind(result) for result in results]}")
    if rows is None:
        return concat(results)
    block = -(-rows // len(results))
    if any(len(result) != block for result in results):
        counts = [len(result) for result in results]
        raise ColumnError(f"every rank got {block} rows and must return as many, in order; got {counts}")
    whole = concat(results)
    return whole if len(whole) == rows else whole.rows(slice(0, rows))


def _kind(value: Any) -> str:
    return type(value).__name__


# ---------------------------------------------------------------------------------------------------- the protocols


def _split(arguments: Arguments, blocks: Sequence[int], parts: int) -> list[Arguments | None]:
    """Arguments of every rank, where rank r works on block ``blocks[r]`` of ``parts``; equal blocks are one object."""
    row_count(arguments)
    pieces = {name: split_rows(batch, parts) for name, batch in arguments.batches().items()}
    shares = [_share(arguments, {name: blocks[part] for name, blocks in pieces.items()}) for part in range(parts)]
    return [shares[block] for block in blocks]


def _share(arguments: Arguments, blocks: Mapping[str, Batch]) -> Arguments:
    return Arguments(
        tuple(blocks.get(f"argument {i}", value) for i, value in enumerate(arguments.args)),
        {name: blocks.get(f"argument {name!r}", value) for name, value in arguments.kwargs.items()},
    )


def _to_all(layout: ParallelDims, arguments: Arguments) -> list[Arguments | None]:
    return [arguments] * layout.world


def _from_all(layout: ParallelDims, results: Sequence[Any], rows: int | None) -> list[Any]:
    return list(results)


def _to_rank_zero(layout: ParallelDims, arguments: Arguments) -> list[Arguments | None]:
    return [arguments, *[None] * (layout.world - 1)]


def _from_rank_zero(layout: ParallelDims, results: Sequence[Any], rows: int | None) -> Any:
    return results[0]


def _rank_zero(layout: ParallelDims) -> tuple[int, ...]:
    return (0,)


def _to_every_rank(layout: ParallelDims, arguments: Arguments) -> list[Arguments | None]:
    return _split(arguments, range(layout.world), layout.world)


def _from_every_rank(layout: ParallelDims, results: Sequence[Any], rows: int | None) -> Any:
    return join(results, rows)


def _to_mesh(layout: ParallelDims, arguments: Arguments) -> list[Arguments | None]:
    return _split(arguments, [layout.dp_coordinate(rank) for rank in range(layout.world)], layout.dp)


def _from_mesh(layout: ParallelDims, results: Sequence[Any], rows: int | None) -> Any:
    return join([results[rank] for rank in layout.collect_ranks()], rows)


def _micro_block(layout: ParallelDims, rank: int) -> int:
    at = layout.coordinates(rank)
    return (layout.dp_coordinate(rank) * layout.pp + at["pp"]) * layout.sp + at["sp"]


def _to_micro_dp(layout: ParallelDims, arguments: Arguments) -> list[Arguments | None]:
    blocks = [_micro_block(layout, rank) for rank in range(layout.world)]
    return _split(arguments, blocks, layout.dp * layout.pp * layout.sp)


def _micro_dp_ranks(layout: ParallelDims) -> list[int]:
    leaders = [rank for rank in range(layout.world) if layout.coordinates(rank)["tp"] == 0]
    return sorted(leaders, key=lambda rank: _micro_block(layout, rank))


def _from_micro_dp(layout: ParallelDims, results: Sequence[Any], rows: int | None) -> Any:
    return join([results[rank] for rank in _micro_dp_ranks(layout)], rows)


def _stage_ranks(layout: ParallelDims) -> list[int]:
    return [layout.rank(pp=stage) for stage in range(layout.pp)]


def _from_stages(layout: ParallelDims, results: Sequence[Any], rows: int | None) -> list[Any]:
    return [results[rank] for rank in _stage_ranks(layout)]


def _to_each(layout: ParallelDims, arguments: Arguments) -> list[Arguments | None]:
    values = [*arguments.args, *arguments.kwargs.values()]
    if any(not isinstance(value, list | tuple) or len(value) != layout.world for value in values):
        raise EngineError(f"ALL_TO_ALL takes one list per argument with {layout.world} entries, one for every rank")
    return [
        Arguments(tuple(v[rank] for v in arguments.args), {name: v[rank] for name, v in arguments.kwargs.items()})
        for rank in range(layout.world)
    ]


PROTOCOLS: dict[str, Transfer] = {
    # The same arguments to every rank; a list of every rank's result.
    "ONE_TO_ALL": Transfer(_to_all, _from_all),
    # Only rank 0 is called; its result.
    "RANK_ZERO": Transfer(_to_rank_zero, _from_rank_zero, _rank_zero),
    # Rows split over all ranks, whatever the layout; results of all ranks joined.
    "DP_COMPUTE": Transfer(_to_every_rank, _from_every_rank),
    # Rows split over dp, the same block to every pp, sp and tp rank; joined over (last stage, sp 0, tp 0).
    "MESH_3D": Transfer(_to_mesh, _from_mesh, ParallelDims.collect_ranks),
    # Inside a training replica each group of tp ranks generates on its own: rows split over dp x pp x sp, the same
    # block to the tp ranks of a group; joined over tp 0. Another generation TP has its own mesh: MESH_3D on that one.
    "MESH_3D_MICRO_DP": Transfer(_to_micro_dp, _from_micro_dp, _micro_dp_ranks),
    # The same arguments to every rank; a list with the result of every stage (dp 0, sp 0, tp 0).
    "PP_ONLY": Transfer(_to_all, _from_stages, _stage_ranks),
    # Every argument is a list with one entry per rank; a list of every rank's result.
    "ALL_TO_ALL": Transfer(_to_each, _from_all),
}


def add_protocol(name: str, transfer: Transfer) -> None:
    """Makes ``transfer`` usable as ``@register(dispatch=name)``.

    Raises:
        ConfigError: when the name is taken by another protocol.
    """
    if PROTOCOLS.get(name, transfer) != transfer:
        raise ConfigError(f"transfer protocol {name!r} exists already; choose another name")
    PROTOCOLS[name] = transfer


def protocol(dispatch: str | Transfer) -> Transfer:
    """The protocol that ``@register(dispatch=...)`` named or gave.

    Raises:
        ConfigError: when no protocol has this name.
    """
    if isinstance(dispatch, Transfer):
        return dispatch
    if dispatch not in PROTOCOLS:
        raise ConfigError(f"no transfer protocol {dispatch!r}; there are {', '.join(PROTOCOLS)}, or pass a Transfer")
    return PROTOCOLS[dispatch]
