"""Weights & Biases, online or offline (``WANDB_MODE=offline`` writes below the run's folder, to be synced later)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import wandb

from hybridflow.trainer.tracking import RunInfo, scalars
from hybridflow.utils.errors import StateError

logger = logging.getLogger(__name__)

SERVICE = "wandb-core"
"""Name of the process that uploads."""


class WandbTracker:
    """One W&B run, started at the first logged step.

    Its id is kept in the folder: a run whose first logged step is above 1 is a resumed one and goes on under that id.
    It is kept in checkpoints, too, for a run that goes on in another folder: under that id if project and experiment
    have the same names, else it is a branch and becomes a run of its own.
    When the start fails it is not tried again (an unreachable server takes a minute to say so); every call raises.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._id_file = info.folder / "wandb_run_id"
        self._run: wandb.Run | None = None
        self._tried = False
        self._known = ""

    def state_dict(self) -> dict[str, str]:
        """Which run it is; empty before it has started."""
        known = self._known if self._run is None else self._run.id
        return {"id": known, "project": self._info.project, "experiment": self._info.experiment} if known else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on in the run of the checkpoint, if this is the same one."""
        if (state.get("project"), state.get("experiment")) == (self._info.project, self._info.experiment):
            self._known = str(state["id"])

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

    def abandon(self) -> None:
        """Ends W&B's service, for which an exit hook of its own would wait; what it had written can be synced later."""
        service = [child for child in psutil.Process().children() if SERVICE in child.name()]
        for process in service:
            process.kill()
        logger.warning("what W&B has not uploaded lies below %s: wandb sync DIR", self._info.folder / "wandb")

    def _id(self) -> str | None:
        return self._id_file.read_text().strip() if self._id_file.exists() else self._known or None

    def _at(self, step: int) -> wandb.Run:
        if self._run is None:
            if self._tried:
                raise StateError("wandb did not start; see the first warning")
            self._tried = True
            known = self._id() if step > 1 else None
            self._run = wandb.init(
                project=self._info.project,
                name=self._info.experiment,
                dir=str(self._info.folder),
                config=dict(self._info.config),
                id=known,
                resume=None if known is None else "allow",
            )
            self._id_file.write_text(self._run.id)
        return self._run


def _cell(value: Any) -> Any:
    return value if isinstance(value, (int, float, str)) else str(value)
