"""The observer: a worker in every process that looks on while the others work, and says what their calls cost.

In every step it takes the time and the highest memory of each call, and how much of the time was spent in collectives
(communication.py). In steps that ``profiler.steps`` names it records them with torch's profiler (profiler.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.roles.profiles import CallCost, CallProfile, Generated, StepCosts
from hybridflow.workers.communication import CollectiveTime
from hybridflow.workers.peak_memory import PeakMemory
from hybridflow.workers.profiler import CallProfiler

ROLE = "observer"


@runtime_checkable
class Measured(Protocol):
    """A worker that counts its work."""

    def take_work(self) -> Mapping[str, float]:
        """Metrics of the work since the last call. Collective: every rank calls it; equal on all ranks."""
        ...


@runtime_checkable
class Generator(Protocol):
    """A worker that counts what it generates."""

    def take_generated(self) -> Generated | None:
        """What this rank did since the last call; None: nothing."""
        ...


class ObserverWorker:
    """One rank of the observer; must be built last.

    Args:
        context: where this rank runs; the worker becomes its recorder.
        config: the whole configuration.
    """

    def __init__(self, context: RankContext, *, config: PPOConfig) -> None:
        self._context = context
        self._peak = PeakMemory(context.device)
        self._profiler = CallProfiler(context, config.profiler)
        self._collectives = CollectiveTime(context.device)
        self._calls: list[CallCost] = []
        context.recorder = self

    @contextmanager
    def around(self, role: str, method: str) -> Iterator[None]:
        """Measures one call of another role."""
        if role == ROLE:
            yield
            return
        self._peak.reset()
        self._collectives.begin()
        start = time.perf_counter()
        with self._profiler.around(role, method):
            yield
        cost = CallCost(
            role=role,
            method=method,
            seconds=time.perf_counter() - start,
            communication_seconds=self._collectives.seconds(),
            peak_bytes=self._peak.bytes(),
        )
        self._calls.append(cost)

    @register(dispatch="ONE_TO_ALL")
    def begin_step(self) -> None:
        """Forgets what came before: validation, checkpoints, the start."""
        self._calls.clear()
        self._work()
        self._generated()

    @register(dispatch="ONE_TO_ALL")
    def step_costs(self) -> StepCosts:
        """Every call since ``begin_step``, and what the roles have to say."""
        return StepCosts(calls=tuple(self._calls), metrics=self._work(), generated=self._generated())

    def _work(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for worker in self._context.siblings.values():
            if isinstance(worker, Measured):
                found.update(worker.take_work())
        return found

    def _generated(self) -> Generated | None:
        taken = [worker.take_generated() for worker in self._context.siblings.values() if isinstance(worker, Generator)]
        return next(iter(taken), None)

    @register(dispatch="ONE_TO_ALL")
    def start_profile(self, folder: str) -> None:
        """Records calls from now on."""
        self._profiler.start(folder)

    @register(dispatch="ONE_TO_ALL")
    def finish_profile(self) -> list[CallProfile]:
        """Ends the recording; what every call cost, in their order."""
        return self._profiler.finish()
