"""What a person at the console sees: how long the start took, one line a step, and how it ended.

On a terminal the steps are one live line with a bar; elsewhere (a log file, CI) each step is a plain line.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column, Table

from hybridflow.trainer.tracking import RunInfo, clean_name

FIELDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/score/mean", "reward/mean", "score/mean"), "{:.3f}"),
    ("kl", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), "{:.4f}"),
    ("length", ("response_length/mean",), "{:.1f}"),
    ("tok/s", ("perf/throughput",), "{:,.0f}"),
    ("s/step", ("perf/time_per_step", "timing_s/step"), "{:.2f}"),
)
"""Label, the metrics that may stand for it (the first present one does) and its format. KL: to the reference where
there is one, else of the update itself."""
_VALIDATION = "val-core/"
_ETA_WINDOW = 20
BAR_FROM = 105
"""Columns of a terminal that hold the numbers of a step and a bar."""


@cache
def screen() -> Console:
    """The one console on standard output: two of them would write over each other's live line."""
    return Console(highlight=False, soft_wrap=True)


class ConsoleTracker:
    """The console as a tracker: the step line, and one line for every validation.

    Args:
        info: the run.
        console: where to; None: ``screen()``.
    """

    def __init__(self, info: RunInfo, console: Console | None = None) -> None:
        self._console = console if console is not None else screen()
        self._total = info.total_steps
        self._seconds: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._progress: Progress | None = None
        self._task: Any = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Prints what is there: the training step, the validation, or both."""
        line = self._step_line(metrics)
        if line and self._console.is_terminal:
            self._live(step, line)
        elif line:
            self._print(f"step {step}/{self._total}  {line}")
        validation = {name: value for name, value in metrics.items() if name.startswith(_VALIDATION)}
        if validation:
            self._print(f"validation at step {step}: {_pairs(validation)}")

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Prints prompt, response and score of each."""
        for sample in samples:
            self._print(f"sample at step {step}: " + " | ".join(f"{key}: {value!r}" for key, value in sample.items()))

    def finish(self) -> None:
        """Ends the live line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _step_line(self, metrics: Mapping[str, Any]) -> str:
        parts = []
        for label, names, form in FIELDS:
            value = next((metrics[name] for name in names if name in metrics), None)
            if isinstance(value, (int, float)):
                parts.append(f"{label} {form.format(value)}")
                if label == "s/step":
                    self._seconds.append(float(value))
                    left = self._total - int(metrics.get("training/global_step", self._total))
                    parts.append(f"eta {_duration(left * sum(self._seconds) / len(self._seconds))}")
        return "  ".join(parts)

    def _live(self, step: int, line: str) -> None:
        progress = self._progress
        if progress is None:
            steps = Column(no_wrap=True, min_width=len(f"{self._total}/{self._total}"))
            counted: list[ProgressColumn] = [MofNCompleteColumn(table_column=steps)]
            if self._console.width >= BAR_FROM:
                counted = [TextColumn("step"), *counted, BarColumn(20)]
            numbers = TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            progress = Progress(*counted, numbers, console=self._console, refresh_per_second=4)
            self._progress, self._task = progress, progress.add_task("", total=self._total, line="")
            progress.start()
        if self._console.width < BAR_FROM:
            line = line.replace("  ", " ")
        progress.update(self._task, completed=step, line=line, refresh=True)


class StartUp:
    """How long each phase of the start took, from the start of the process on.

    The first row, ``python and imports``, is the time from process start to this object; a restart has none.
    """

    def __init__(self, *, restart: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        if not restart:
            born = psutil.Process(os.getpid()).create_time()
            self.seconds["python and imports"] = max(0.0, time.time() - born)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase; phases may overlap or repeat (then they are summed)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def table(self) -> Table:
        """The phases as a table for ``rich``."""
        table = Table(title="start-up", title_justify="left", box=None, show_header=False, padding=(0, 2))
        table.add_column("phase")
        table.add_column("seconds", justify="right")
        for name, seconds in self.seconds.items():
            table.add_row(name, f"{seconds:.1f} s")
        table.add_row("all phases", f"{sum(self.seconds.values()):.1f} s")
        return table


def final_lines(
    before: Mapping[str, float], after: Mapping[str, float], *, folder: str | Path, try_next: Sequence[str]
) -> list[str]:
    """What a run ends with: every validation number from what to what, where its outputs are, what to try next."""
    lines = []
    for name, last in after.items():
        if not name.startswith(_VALIDATION):
            continue
        first = before.get(name)
        change = f"{last:.3f}" if first is None else f"{first:.3f} -> {last:.3f} ({last - first:+.3f})"
        lines.append(f"{clean_name(name.removeprefix(_VALIDATION))}: {change}")
    lines.append(f"outputs: {folder}")
    if try_next:
        lines.append("try next:")
        lines.extend(f"  {command}" for command in try_next)
    return lines


def _pairs(metrics: Mapping[str, Any]) -> str:
    shown = {name: f"{value:.3f}" if isinstance(value, float) else str(value) for name, value in metrics.items()}
    return "  ".join(f"{name.removeprefix(_VALIDATION)} {value}" for name, value in shown.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
