"""Numbers that every rank must agree on: rounds of micro-batches, counts, metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.contract import Counts, Metric
from hybridflow.batch.balance import count_batches, micro_batches
from hybridflow.batch.batch import Batch
from hybridflow.engines.train.base import MicroBatching
from hybridflow.models.packing import row_tokens
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError

Part = tuple[float, float, str]
"""value, weight, how."""


def cut_rounds(
    rows: Batch,
    micro: MicroBatching,
    *,
    dims: ParallelDims,
    device: str,
    hidden: int,
    groups: Sequence[int] | None = None,
    at_least: int = 1,
) -> list[list[int]]:
    """Row positions of every micro-batch; as many on all ranks, ``at_least`` so many, some may be empty. Collective.

    Args:
        rows: this rank's.
        micro: the budget of one data-parallel coordinate.
        hidden: width of the model, which decides how much of a row's cost is attention.
        groups: equal for rows that share a prompt: they stay together, and the prompt counts once; None: none share.

    Raises:
        ConfigError: when neither budget nor count is given.
    """
    if (micro.max_tokens is None) == (micro.max_rows is None):
        raise ConfigError(f"micro-batches are cut by a token budget or by a row count: give one of both, got {micro}")
    units = _units(rows, micro, groups)
    own = _cut(units, micro, at_least=1, hidden=hidden)
    rounds = max(at_least, int(reduce_max(len(own), dims, device)))
    even = _cut(units, micro, at_least=rounds, hidden=hidden)
    parts = even if len(even) <= rounds else own
    return parts + [[] for _ in range(rounds - len(parts))]


def _units(rows: Batch, micro: MicroBatching, groups: Sequence[int] | None) -> list[tuple[list[int], int]]:
    """(rows that stay together, their tokens); rows of a group are neighbours."""
    tokens = row_tokens(rows).tolist()
    if groups is None:
        return [([row], count) for row, count in enumerate(tokens)]
    prompts = rows["prompt_length"].tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    if micro.max_tokens is None:
        return [([row], tokens[row]) for held in members.values() for row in held]
    return [unit for held in members.values() for unit in _fill(held, tokens, prompts, micro.max_tokens)]


def _fill(
    held: Sequence[int], tokens: Sequence[int], prompts: Sequence[int], budget: int
) -> list[tuple[list[int], int]]:
    """The rows of one prompt in as few units as fit the budget in their order; each unit brings the prompt once."""
    units: list[tuple[list[int], int]] = []
    for row in held:
        added = max(0, tokens[row] - prompts[row])
        if units and units[-1][1] and units[-1][1] + added <= budget:
            units[-1] = [*units[-1][0], row], units[-1][1] + added
        else:
            units.append(([row], tokens[row]))
    return units


def _cut(
    units: Sequence[tuple[Sequence[int], int]], micro: MicroBatching, *, at_least: int, hidden: int
) -> list[list[int]]:
    if not units:
        return []
    if micro.max_tokens is not None:
        parts = micro_batches([tokens for _, tokens in units], micro.max_tokens, at_least=at_least, hidden=hidden)
    else:
        assert micro.max_rows is not None
        parts = count_batches(len(units), micro.max_rows, at_least=at_least)
    return [[row for unit in part for row in units[unit][0]] for part in parts]


def reduce_max(value: float, dims: ParallelDims, device: str) -> float:
    """The largest ``value`` of all ranks. Collective."""
    if dims.world == 1:
        return value
    held = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return float(held)


def count(rows: Batch, dims: ParallelDims, device: str) -> Counts:
    """Counts over all data-parallel coordinates; ranks of one coordinate hold the same rows. Collective."""
    mask = rows["loss_mask"].bool()
    held = torch.tensor([int(mask.sum()), int(mask.any(-1).sum()), len(rows)], device=device)
    if dims.world > 1:
        dist.all_reduce(held)
        held = held // (dims.world // dims.dp)
    tokens, sequences, total = held.tolist()
    return Counts(tokens=tokens, sequences=sequences, rows=total)


def summed(value: Tensor) -> Metric:
    """``value`` as a share of a sum."""
    return Metric(value.detach(), how="sum")


def add_metrics(sums: dict[str, Part], metrics: Mapping[str, Metric]) -> None:
    """Folds a micro-batch's metrics into ``sums``."""
    for name, metric in metrics.items():
        part = (float(metric.value), float(metric.weight), metric.how)
        sums[name] = _combine(name, sums[name], part) if name in sums else part


def gather_metrics(sums: dict[str, Part], dims: ParallelDims) -> dict[str, float]:
    """Metrics over all data-parallel coordinates, equal on all ranks. Collective."""
    everyone: list[dict[str, Part] | None] = [sums]
    if dims.world > 1:
        everyone = [None] * dims.world
        dist.all_gather_object(everyone, sums)
        everyone = [everyone[rank] for rank in dims.collect_ranks()]
    total: dict[str, Part] = {}
    for part in everyone:
        for name, value in (part or {}).items():
            total[name] = _combine(name, total[name], value) if name in total else value
    return {name: _finish(part) for name, part in sorted(total.items())}


def _combine(name: str, a: Part, b: Part) -> Part:
    if a[2] != b[2]:
        raise ValueError(f"metric {name!r} is combined both by {a[2]} and by {b[2]}")
    how = a[2]
    if how in ("sum", "mean"):
        return a[0] + b[0], a[1] + b[1], how
    if how == "max":
        return max(a[0], b[0]), 1.0, how
    if how == "min":
        return min(a[0], b[0]), 1.0, how
    raise ValueError(f"metric {name!r}: how={how!r} is none of sum, mean, max, min")


def _finish(part: Part) -> float:
    value, weight, how = part
    if how == "mean":
        return value / weight if weight else (math.nan if value else 0.0)
    return value
