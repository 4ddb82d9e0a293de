"""TensorBoard event files under ``<folder>/tensorboard``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter

from hybridflow.trainer.tracking import RunInfo, scalars


class TensorBoardTracker:
    """Scalars and sample texts; a resumed run adds files to the same folder.

    The first logged step says where it goes on: readers drop what the files before hold from there on.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._folder = info.folder / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        self._opened: SummaryWriter | None = None

    def _writer(self, step: int) -> SummaryWriter:
        if self._opened is not None:
            return self._opened
        writer = self._opened = SummaryWriter(log_dir=str(self._folder), purge_step=step)
        text = json.dumps(self._info.config, indent=1, default=str)
        writer.add_text("config", f"```\n{text}\n```", step)
        return writer

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the numbers; flushed, so that a crash loses nothing."""
        writer = self._writer(step)
        for name, value in scalars(metrics).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Adds one text a sample."""
        for number, sample in enumerate(samples):
            text = "\n\n".join(f"**{key}**: {value}" for key, value in sample.items())
            self._writer(step).add_text(f"val_samples/{number}", text, step)

    def finish(self) -> None:
        """Closes the event file."""
        if self._opened is not None:
            self._opened.close()
