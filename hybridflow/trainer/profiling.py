"""Steps that are recorded: every process looks on, and the costs of every call are printed and written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from hybridflow.batch.futures import gather
from hybridflow.config.profiler import ProfilerConfig
from hybridflow.roles.profiles import CallProfile
from hybridflow.roles.protocols import Observer
from hybridflow.trainer.progress import screen

SUMMARY_FILE = "profile.json"
NAME_WIDTH = 40
"""Characters of an operation's name; with the numbers a line fits 80 columns."""


class StepProfiler:
    """Records the steps that ``profiler.steps`` names.

    Args:
        settings: what is recorded.
        observers: one for each pool.
        folder: of the run.
    """

    def __init__(self, settings: ProfilerConfig, observers: Sequence[Observer], folder: Path) -> None:
        self._settings = settings
        self._observers = observers
        # Processes may have another working directory.
        self._folder = Path(settings.save_path or folder / "profile").resolve()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Records what happens inside, if this step is recorded; then writes ``step_N/profile.json`` and prints."""
        if step not in self._settings.steps:
            yield
            return
        folder = self._folder / f"step_{step}"
        for call in [observer.start_profile(str(folder)) for observer in self._observers]:
            gather(call)
        yield
        calls: list[CallProfile] = []
        for pending in [observer.finish_profile() for observer in self._observers]:
            calls += gather(pending)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY_FILE).write_text(json.dumps([dataclasses.asdict(call) for call in calls], indent=1))
        screen().print(cost_table(calls, step=step, top=self._settings.top))
        screen().print(f"profile: {escape(str(folder))}")

    def over(self, done: int) -> bool:
        """Whether the run ends behind step ``done``, because nothing is left to record."""
        return self._settings.end_run and done >= max(self._settings.steps, default=0)


def cost_table(calls: Sequence[CallProfile], *, step: int, top: int) -> Table:
    """The ``top`` costliest operations of every call, by role and phase; several ranks one after another."""
    table = Table(title=f"profile of step {step}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("operation", no_wrap=True)
    for name in ("calls", "seconds", "share", "peak MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for call in calls:
        peak = f"{call.peak_bytes / 1e6:,.1f}"
        name = f"[bold]{call.role}.{call.method}[/], rank {call.rank}"
        table.add_row(name, "", f"{call.seconds:.3f}", "", peak)
        for cost in call.operations[:top]:
            seconds = cost.device_seconds or cost.seconds
            share = f"{100 * seconds / call.seconds:.1f} %" if call.seconds else ""
            held = f"{cost.peak_bytes / 1e6:,.1f}" if cost.peak_bytes else ""
            table.add_row(f"  {escape(_short(cost.name))}", f"{cost.calls:,}", f"{seconds:.3f}", share, held)
    return table


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."
