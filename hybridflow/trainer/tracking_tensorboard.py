"""TensorBoard event files under ``<folder>/tensorboard``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter

from hybridflow.trainer.tracking import RunInfo, scalars


class TensorBoardTracker:
    """Scalars and sample texts; a resumed run adds files to the same folder and its steps go on."""

    def __init__(self, info: RunInfo) -> None:
        self._writer = SummaryWriter(log_dir=str(info.folder / "tensorboard"))
        self._writer.add_text("config", f"```\n{json.dumps(info.config, indent=1, default=str)}\n```", 0)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the numbers; flushed, so that a crash loses nothing."""
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Adds one text a sample."""
        for number, sample in enumerate(samples):
            text = "\n\n".join(f"**{key}**: {value}" for key, value in sample.items())
            self._writer.add_text(f"val_samples/{number}", text, step)

    def finish(self) -> None:
        """Closes the event file."""
        self._writer.close()
