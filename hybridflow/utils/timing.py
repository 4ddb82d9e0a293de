"""Named phases of a step and how long each took, under the names that verl's users plot (``timing_s/gen`` ...)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by phase name, summed when a phase is entered more than once.

    Phases may nest and may overlap (a phase is the time inside its ``with``, not a share of the step), so their sum may
    differ from the step. Not thread-safe: one stopwatch belongs to one loop.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to ``name``, also when the body raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds time that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last ``take``, in the order in which phases first ended."""
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Metrics ``timing_s/<phase>`` of everything since the last ``take``, which starts anew."""
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
