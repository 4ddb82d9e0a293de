"""kill -9 on a rank of a job while it is inside a chosen call."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from hybridflow.single_controller import health
from hybridflow.single_controller.lanes import LaneGroup


@dataclass(frozen=True)
class Kill:
    """One kill."""

    method: str
    """During a call of this method ..."""
    number: int
    """... the how-manieth of the job, restarts included, from 1."""
    rank: int = 1
    delay_s: float = 0.0
    """From when the call was sent."""


@contextmanager
def killing(*kills: Kill) -> Iterator[list[int]]:
    """Carries out each kill once; the pids that were killed, each followed by those of its children."""
    call, counts, killed = LaneGroup.call, Counter[str](), list[int]()
    done: list[Kill] = []

    def dangerous(group: LaneGroup, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        counts[method] += 1
        pending = call(group, role, method, *args, **kwargs)
        for kill in kills:
            if (kill.method, kill.number) == (method, counts[method]):
                place = group._lanes.place(kill.rank)
                assert place is not None
                time.sleep(kill.delay_s)
                children = health.descendants([place.pid])
                os.kill(place.pid, signal.SIGKILL)
                killed.extend([place.pid, *children])
                done.append(kill)
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneGroup, "call", dangerous)
        yield killed
    assert len(done) == len(kills), f"of {kills} only {done} happened"
