"""Weights & Biases, online or offline (``WANDB_MODE=offline`` writes below the run's folder, to be synced later)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from hybridflow.trainer.tracking import RunInfo, scalars
from hybridflow.utils.errors import StateError


class WandbTracker:
    """One W&B run, started at the first logged step.

    Its id is kept in the folder: a run whose first logged step is above 1 is a resumed one and goes on under that id.
    When the start fails it is not tried again (an unreachable server takes a minute to say so); every call raises.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._id_file = info.folder / "wandb_run_id"
        self._run: wandb.Run | None = None
        self._tried = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the numbers at ``step``."""
        self._at(step).log(scalars(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs a table of samples."""
        columns: list[Any] = list(samples[0])
        rows: list[Any] = [[_cell(sample.get(column)) for column in columns] for sample in samples]
        self._at(step).log({"val_samples": wandb.Table(columns=columns, data=rows)}, step=step)

    def finish(self) -> None:
        """Ends the run, if it ever started."""
        if self._run is not None:
            self._run.finish()

    def _at(self, step: int) -> wandb.Run:
        if self._run is None:
            if self._tried:
                raise StateError("wandb did not start; see the first warning")
            self._tried = True
            resumed = step > 1 and self._id_file.exists()
            self._run = wandb.init(
                project=self._info.project,
                name=self._info.experiment,
                dir=str(self._info.folder),
                config=dict(self._info.config),
                id=self._id_file.read_text().strip() if resumed else None,
                resume="allow" if resumed else None,
            )
            self._id_file.write_text(self._run.id)
        return self._run


def _cell(value: Any) -> Any:
    return value if isinstance(value, (int, float, str)) else str(value)
