"""Tells a call that hangs from one that is slow, long before the deadline of either passes.

    every look -> ranks that still work are asked for their pulse on the control lane
    no answer for ``silence_s``                          -> the process stands still, or cannot be reached
    in the middle of steps, and none ends for too long   -> the work lane hangs, while the process lives

Too long is ten times the longest step of that rank so far, at least ``silence_s``; before its first step ten times
``silence_s``, since nothing is known of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hybridflow.dispatch.group import Beats

LOOKS = 6
"""Looks within ``silence_s``."""
LONGEST_LOOK_S = 5.0
"""How long one look waits for ranks that do not answer: nothing else is noticed meanwhile."""
SLACK = 10.0
"""How many times its longest step a rank may take for the next."""


class Vigil:
    """Watches one call.

    Args:
        ask: pulses by rank of the given ranks, waiting at most so many seconds; silent ranks are missing.
        silence_s: see above.
    """

    def __init__(self, ask: Callable[[Sequence[int], float], Mapping[int, Beats]], silence_s: float) -> None:
        self._ask = ask
        self._silence_s = silence_s
        self._every_s = silence_s / LOOKS
        self._begun_at = time.monotonic()
        self._look_at = self._begun_at + self._every_s
        self._heard_at: dict[int, float] = {}
        self._moved_at: dict[int, float] = {}
        self._beats: dict[int, Beats] = {}

    def hangs(self, working: Sequence[int]) -> Mapping[int, str]:
        """By rank what is wrong, of those that still work; empty: nothing, or it is not time for a look yet."""
        if time.monotonic() < self._look_at:
            return {}
        answers = self._ask(working, min(LONGEST_LOOK_S, self._every_s))
        now = time.monotonic()
        self._look_at = now + self._every_s
        for rank, beats in answers.items():
            self._heard_at[rank] = now
            before = self._beats.get(rank)
            if before is None or not beats.expected or beats.count != before.count:
                self._moved_at[rank] = now
            self._beats[rank] = beats
        found = {rank: self._fault(rank, now) for rank in working}
        return {rank: fault for rank, fault in found.items() if fault}

    def _fault(self, rank: int, now: float) -> str:
        silent_s = now - self._heard_at.get(rank, self._begun_at)
        if silent_s > self._silence_s:
            return f"its control lane has been silent for {silent_s:.0f} s"
        beats, moved_at = self._beats.get(rank), self._moved_at.get(rank)
        if beats is None or moved_at is None:
            return ""
        patience_s = SLACK * (beats.longest_s if beats.count else self._silence_s)
        if now - moved_at <= max(self._silence_s, patience_s):
            return ""
        known = f"its longest took {beats.longest_s:.1f} s" if beats.count else "it has not ended one yet"
        return f"no step of it has ended for {now - moved_at:.0f} s; {known}"
