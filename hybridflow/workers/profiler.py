"""The profiler of one rank: it records the calls of its process in chosen steps.

Every call of a chosen role is one session of torch's profiler and one trace, so traces stay small and are found by
name. What a session costs in time it costs inside the call; reading the events waits until the step is over.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from hybridflow.config.profiler import ProfilerConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.roles.profiles import CallProfile, OperationCost

MAX_SNAPSHOT_ENTRIES = 100_000
"""Allocations that a snapshot of the GPU's allocator goes back."""
_MEMORY_EVENT = "[memory]"
_ALLOCATION = _EventType.Allocation


@runtime_checkable
class HoldsTensors(Protocol):
    """A worker that can say what it holds."""

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes on this rank by kind: parameters, gradients, optimizer, weights, kv_cache."""
        ...


@dataclass(frozen=True, slots=True)
class _Session:
    role: str
    method: str
    profile: Any
    seconds: float
    held: dict[str, dict[str, int]]


class CallProfiler:
    """Records nothing until ``start``.

    Args:
        context: where this rank runs.
        settings: what is recorded.
    """

    def __init__(self, context: RankContext, settings: ProfilerConfig) -> None:
        self._context = context
        self._settings = settings
        self._folder: Path | None = None
        self._sessions: list[_Session] = []
        self._snapshots: list[str] = []

    def start(self, folder: str) -> None:
        """Records calls from now on; ``folder`` gets their files."""
        if self._settings.all_ranks or self._context.rank in self._settings.ranks:
            self._folder = Path(folder)
            self._folder.mkdir(parents=True, exist_ok=True)

    def finish(self) -> list[CallProfile]:
        """Ends the recording, writes the traces; what every call cost, in their order."""
        folder, self._folder = self._folder, None
        sessions, self._sessions = self._sessions, []
        if folder is None:
            return []
        seen: defaultdict[str, int] = defaultdict(int)
        found = []
        for session in sessions:
            name = f"{session.role}.{session.method}"
            seen[name] += 1
            again = f".{seen[name]}" if seen[name] > 1 else ""
            trace = f"{name}{again}.rank{self._context.rank}.trace.json.gz"
            session.profile.export_chrome_trace(str(folder / trace))
            files = (trace, *(file for file in self._snapshots if file.startswith(f"{name}{again}.rank")))
            found.append(_summary(session, self._context.rank, files))
        self._snapshots.clear()
        return found

    @contextmanager
    def around(self, role: str, method: str) -> Iterator[None]:
        """Records one call, if this step and role are recorded."""
        if self._folder is None or role not in self._settings.roles:
            yield
            return
        on_gpu = self._context.device.startswith("cuda")
        contents = self._settings.contents
        session = profile(
            activities=_activities(contents, on_gpu),
            profile_memory="memory" in contents,
            record_shapes="shapes" in contents,
            with_stack="stack" in contents,
        )
        with self._snapshot(role, method) if on_gpu and "memory" in contents else _nothing():
            start = time.perf_counter()
            with session:
                yield
                if on_gpu:
                    torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        held = {
            name: dict(worker.held_bytes())
            for name, worker in self._context.siblings.items()
            if isinstance(worker, HoldsTensors)
        }
        self._sessions.append(_Session(role, method, session, seconds, held))

    @contextmanager
    def _snapshot(self, role: str, method: str) -> Iterator[None]:
        """Keeps the history of the GPU's allocator. Not run here: needs CUDA."""
        assert self._folder is not None
        torch.cuda.memory._record_memory_history(max_entries=MAX_SNAPSHOT_ENTRIES)
        try:
            yield
        finally:
            again = 1 + sum((session.role, session.method) == (role, method) for session in self._sessions)
            number = f".{again}" if again > 1 else ""
            name = f"{role}.{method}{number}.rank{self._context.rank}.memory.pickle"
            torch.cuda.memory._dump_snapshot(str(self._folder / name))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._snapshots.append(name)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _activities(contents: Iterable[str], on_gpu: bool) -> list[ProfilerActivity]:
    wanted = [ProfilerActivity.CPU] if "cpu" in contents else []
    return wanted + ([ProfilerActivity.CUDA] if "cuda" in contents and on_gpu else [])


def _summary(session: _Session, rank: int, files: tuple[str, ...]) -> CallProfile:
    results = session.profile.profiler.kineto_results
    peak, left, at_peak = allocations(results.experimental_event_tree())
    operations = [
        OperationCost(
            name=name,
            calls=cost.calls,
            seconds=cost.nanoseconds / 1e9,
            device_seconds=cost.device_nanoseconds / 1e9,
            peak_bytes=at_peak.get(name, 0),
        )
        for name, cost in own_times(results.events()).items()
    ]
    return CallProfile(
        role=session.role,
        method=session.method,
        rank=rank,
        seconds=session.seconds,
        operations=tuple(sorted(operations, key=lambda cost: -(cost.seconds + cost.device_seconds))),
        peak_bytes=peak,
        left_bytes=left,
        held_bytes=session.held,
        files=files,
    )


@dataclass(slots=True)
class OwnTime:
    """All executions of one operation."""

    calls: int = 0
    nanoseconds: int = 0
    device_nanoseconds: int = 0


def own_times(events: Iterable[Any]) -> dict[str, OwnTime]:
    """Calls and time of every operation without the operations that it called; a GPU's kernels by their own names.

    torch's ``key_averages`` says the same, but takes minutes for the operations of a generation.
    """
    found: defaultdict[str, OwnTime] = defaultdict(OwnTime)
    by_thread: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        name, start, length = event.name(), event.start_ns(), event.duration_ns()
        if name == _MEMORY_EVENT:
            continue
        found[name].calls += 1
        if event.device_type() == torch.autograd.DeviceType.CPU:
            by_thread[event.start_thread_id()].append((start, -(start + length), name))
        else:
            found[name].device_nanoseconds += length
    for spans in by_thread.values():
        open_spans: list[tuple[int, str]] = []
        for start, negative_end, name in sorted(spans):
            while open_spans and open_spans[-1][0] <= start:
                open_spans.pop()
            found[name].nanoseconds += -negative_end - start
            if open_spans:
                # An operation may reach its kernel under its own name: one call.
                found[name].calls -= open_spans[-1][1] == name
                # An asynchronous span may outlast the one it lies in: only the common part is taken away.
                found[open_spans[-1][1]].nanoseconds -= min(-negative_end, open_spans[-1][0]) - start
            open_spans.append((-negative_end, name))
    return dict(found)


def allocations(roots: Iterable[Any]) -> tuple[int, int, dict[str, int]]:
    """Peak and final bytes above the start of a session, and who had allocated what was held at the peak.

    ``roots``: the profiler's event tree. Memory of before the session that is freed inside it counts below 0.
    """
    events = sorted(_allocations_below(roots), key=lambda event: event.start_time_ns)
    now = peak = 0
    at = -1
    for position, event in enumerate(events):
        now += event.extra_fields.alloc_size
        if now > peak:
            peak, at = now, position
    live: dict[int, tuple[str, int]] = {}
    for event in events[: at + 1]:
        fields = event.extra_fields
        if fields.alloc_size > 0:
            live[fields.ptr] = (
                event.parent.name if event.parent is not None else "outside operations",
                fields.alloc_size,
            )
        else:
            live.pop(fields.ptr, None)
    by_operation: defaultdict[str, int] = defaultdict(int)
    for name, size in live.values():
        by_operation[name] += size
    return peak, now, dict(by_operation)


def _allocations_below(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _ALLOCATION:
            yield event
