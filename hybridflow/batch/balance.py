"""Balance: rows of unequal cost over ranks and micro-batches.

``balance`` is the largest-differencing method of Karmarkar and Karp (1982): keep a heap of partial solutions, and merge
the two with the largest spread, heavy parts onto light ones. Ties are broken by row position, so the same input gives
the same answer everywhere. Costs are attention-aware: see ``row_cost``.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

Cost = float | int
TYPICAL_WIDTH = 1024
"""Width of a model of which nothing is known."""


def row_cost(tokens: int, *, hidden: int = TYPICAL_WIDTH) -> int:
    """Relative cost of a row of ``tokens`` tokens in a transformer of width ``hidden``.

    A layer does about ``24 d^2`` multiply-adds a token in its matrices and ``2 d`` a pair of tokens in (causal)
    attention: ``L (12 d + L)`` up to a factor.
    """
    return tokens * (12 * hidden + tokens)


def balance(costs: Sequence[Cost], parts: int, equal_counts: bool = False) -> list[list[int]]:
    """Positions of ``costs`` in ``parts`` groups of nearly equal total cost; each group ascending.

    Args:
        costs: cost per row, any non-negative number.
        parts: number of groups; groups may be empty when there are fewer rows.
        equal_counts: whether group sizes may differ by at most one.

    Raises:
        ValueError: when ``parts`` is below 1.
    """
    if parts < 1:
        raise ValueError(f"cannot balance over {parts} parts")
    if parts == 1:
        return [list(range(len(costs)))]
    # Beyond a few rows a group, whole blocks of rows are merged (64 times fewer merges) and swaps close what is left.
    blocks = equal_counts or len(costs) > 16 * parts
    groups = _difference(costs, parts, blocks)
    if blocks:
        groups = _swap(costs, groups)
    groups = [sorted(group) for group in groups]
    return sorted(groups, key=lambda group: group[0] if group else len(costs))


def micro_batches(
    tokens: Sequence[int], max_tokens: int, *, at_least: int = 1, hidden: int = TYPICAL_WIDTH
) -> list[list[int]]:
    """Positions of rows in micro-batches of at most ``max_tokens`` tokens each, balanced by cost.

    A row longer than the budget gets a micro-batch of its own. ``at_least`` asks for more micro-batches than the budget
    needs (other ranks need them); there are never more than rows.

    Raises:
        ValueError: when ``max_tokens`` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"a token budget of {max_tokens} holds nothing")
    long = [i for i, count in enumerate(tokens) if count > max_tokens]
    rest = [i for i, count in enumerate(tokens) if count <= max_tokens]
    if not rest:
        return [[i] for i in long]
    wanted = max(-(-sum(tokens[i] for i in rest) // max_tokens), at_least - len(long), 1)
    parts = min(wanted, len(rest))
    while True:
        groups = _fitting(tokens, rest, parts, max_tokens, hidden)
        if groups is not None:
            return [[i] for i in long] + groups
        parts += 1


def count_batches(rows: int, max_rows: int, *, at_least: int = 1) -> list[list[int]]:
    """Positions of ``rows`` rows in consecutive micro-batches of at most ``max_rows`` rows."""
    if max_rows < 1:
        raise ValueError(f"a micro-batch of {max_rows} rows holds nothing")
    parts = min(max(-(-rows // max_rows), at_least), rows)
    if parts <= 0:
        return []
    size, longer = divmod(rows, parts)
    found, start = [], 0
    for part in range(parts):
        end = start + size + (part < longer)
        found.append(list(range(start, end)))
        start = end
    return found


def _fitting(
    tokens: Sequence[int], rows: list[int], parts: int, max_tokens: int, hidden: int
) -> list[list[int]] | None:
    for cost in (lambda count: row_cost(count, hidden=hidden), lambda count: count):
        groups = balance([cost(tokens[i]) for i in rows], parts)
        picked = [[rows[i] for i in group] for group in groups if group]
        if all(sum(tokens[i] for i in group) <= max_tokens for group in picked):
            return picked
    return None


def _difference(costs: Sequence[Cost], parts: int, blocks: bool) -> list[list[int]]:
    """The merges. A state is ``(-spread, tie, groups)`` with groups as (total, rows), heaviest first."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    if blocks:
        # Start from blocks of one row per group: every merge then adds equally many rows to each group.
        for tie, start in enumerate(range(0, len(order), parts)):
            block = order[start : start + parts]
            groups: list[tuple[float, list[int]]] = [(costs[i], [i]) for i in block]
            groups += [(0, []) for _ in range(parts - len(block))]
            heap.append((-(groups[0][0] - groups[-1][0]), tie, groups))
    else:
        for tie, i in enumerate(order):
            groups = [(costs[i], [i])] + [(0, []) for _ in range(parts - 1)]
            heap.append((-costs[i], tie, groups))
    heapq.heapify(heap)
    tie = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, two = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(two), strict=True)]
        merged.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (-(merged[0][0] - merged[-1][0]), tie, merged))
        tie += 1
    return [rows for _, rows in heap[0][2]] if heap else [[] for _ in range(parts)]


def _swap(costs: Sequence[Cost], groups: list[list[int]]) -> list[list[int]]:
    """Swaps rows of the heaviest and the lightest group while that narrows the two; stops within 0.4 % of the mean."""
    held = [sorted((costs[i], i) for i in group) for group in groups]
    sums = [sum(costs[i] for i in group) for group in groups]
    limit = 1.004 * sum(sums) / len(sums)
    for _ in range(8 * len(groups)):
        heavy = max(range(len(sums)), key=lambda part: sums[part])
        light = min(range(len(sums)), key=lambda part: sums[part])
        gap = sums[heavy] - sums[light]
        found = None if sums[heavy] <= limit else _best_swap(held[heavy], held[light], gap)
        if found is None:
            break
        give, take = found
        held[heavy].remove(give)
        held[light].remove(take)
        bisect.insort(held[heavy], take)
        bisect.insort(held[light], give)
        sums[heavy] += take[0] - give[0]
        sums[light] += give[0] - take[0]
    return [[i for _, i in group] for group in held]


def _best_swap(
    heavy: list[tuple[Cost, int]], light: list[tuple[Cost, int]], gap: Cost
) -> tuple[tuple[Cost, int], tuple[Cost, int]] | None:
    """The pair whose swap comes closest to halving ``gap``; None when no swap narrows it."""
    best, found = float(gap), None
    for take in light:
        at = bisect.bisect_left(heavy, (take[0] + gap / 2, -1))
        for give in heavy[max(0, at - 1) : at + 1]:
            left = abs(gap - 2 * (give[0] - take[0]))
            if left < best:
                best, found = left, (give, take)
    return found
