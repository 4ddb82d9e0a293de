"""kill -9, or kill -STOP, on a rank of a job while it is inside a chosen call."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    group: str = ""
    """Calls of this group alone count."""
    victim: str = ""
    """Group of the rank that is killed; empty: the one that is called."""
    stops: bool = False
    """Whether it is stopped in place of killed: it neither answers nor dies."""


@contextmanager
def killing(*kills: Kill) -> Iterator[list[int]]:
    """Carries out each kill once; the pids that were killed, each followed by those of its children."""
    call, counts, killed = LaneGroup.call, Counter[tuple[str, str]](), list[int]()
    groups: dict[str, LaneGroup] = {}
    done: list[Kill] = []

    def dangerous(group: LaneGroup, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        groups[group.name] = group
        counts[method, ""] += 1
        counts[method, group.name] += 1
        pending = call(group, role, method, *args, **kwargs)
        for kill in kills:
            hits = kill.method == method and kill.group in ("", group.name)
            if hits and kill.number == counts[method, kill.group]:
                victim = groups.get(kill.victim, group)
                place = victim._lanes.place(kill.rank)
                assert place is not None
                time.sleep(kill.delay_s)
                children = health.descendants([place.pid])
                with suppress(ProcessLookupError):  # an earlier kill was not noticed yet
                    os.kill(place.pid, signal.SIGSTOP if kill.stops else signal.SIGKILL)
                killed.extend([place.pid, *children])
                done.append(kill)
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneGroup, "call", dangerous)
        yield killed
    assert len(done) == len(kills), f"of {kills} only {done} happened"
