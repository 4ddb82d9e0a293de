"""How long calls usually take, which rank is behind, and where a rank stands that does not answer.

A deadline is set for the worst case; a call that takes many times its usual time is reported long before, once.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping

REMEMBERED = 9
"""Last calls of a method that make its usual time."""
KNOWN_AFTER = 3
"""Calls of a method before it has a usual time."""
STALL_FACTOR = 5.0
"""A call that takes this many times its usual time is reported ..."""
SHORTEST_STALL_S = 30.0
"""... but not before this."""
STALL_SHARE = 0.5
"""Share of its deadline after which a call is reported in any case."""
STRAGGLER_FACTOR = 2.0
"""A rank that takes this many times the median of all ranks is named ..."""
STRAGGLER_EXCESS_S = 1.0
"""... when it is also this much later."""
COLLECTIVE = re.compile(r"torch/distributed/|/gloo|nccl", re.IGNORECASE)
"""Frames of a rank that waits for its peers."""
WORK_LANE = re.compile(r"single_controller/host\.py\", line \d+ in (execute|build|start)\b")
"""Frames of the thread that carries out calls."""


class Pace:
    """Times of the calls of one group."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._ratios: dict[str, float] = {}
        self._named: set[tuple[str, int]] = set()

    def usual_s(self, method: str) -> float | None:
        """The median of the last calls; None while there are too few."""
        known = self._seconds[method]
        return statistics.median(known) if len(known) >= KNOWN_AFTER else None

    def stalls_after_s(self, method: str, deadline_s: float) -> float:
        """From when a call counts as stalled."""
        usual = self.usual_s(method)
        bound = STALL_SHARE * deadline_s
        return bound if usual is None else min(bound, max(SHORTEST_STALL_S, STALL_FACTOR * usual))

    def took(self, method: str, by_rank: Mapping[int, float]) -> tuple[int, float, float] | None:
        """Notes a finished call; (rank, its seconds, the others' median) of a straggler that was not named before."""
        slowest = max(by_rank, key=by_rank.__getitem__)
        longest = by_rank[slowest]
        self._seconds[method].append(longest)
        if len(by_rank) == 1:
            return None
        others = statistics.median([seconds for rank, seconds in by_rank.items() if rank != slowest])
        self._ratios[method] = max(self._ratios.get(method, 0.0), longest / others if others > 0 else 1.0)
        behind = longest > STRAGGLER_FACTOR * others and longest - others > STRAGGLER_EXCESS_S
        if not behind or (method, slowest) in self._named:
            return None
        self._named.add((method, slowest))
        return slowest, longest, others

    def take_ratios(self) -> dict[str, float]:
        """By method: the slowest rank's time over the others' median, the worst since this was last asked."""
        ratios, self._ratios = self._ratios, {}
        return ratios


def stands_at(stacks: str) -> tuple[str, bool]:
    """From the stacks of a rank: the innermost line of its work lane, and whether it waits for its peers there."""
    threads = re.split(r"\n(?=Thread |Current thread )", stacks)
    lane = next((thread for thread in threads if WORK_LANE.search(thread)), None)
    if lane is None:
        return "outside any call", False
    frames = [line.strip() for line in lane.splitlines() if line.strip().startswith("File ")]
    return frames[0], any(COLLECTIVE.search(frame) for frame in frames)
