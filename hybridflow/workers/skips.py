"""Updates that were skipped in a row: counted, and when they are too many the last is written out and the run stops.

The count goes into checkpoints, or a run that is restarted more often than its limit would never stop.

    FOLDER/bad_updates/actor_step_12_update_1/
        update.json             role, step, counts, configuration, where the model comes from
        rows_<rank>.safetensors the mini-batch, as one rank of every data-parallel coordinate had it
        weights/                the weights that made it: a checkpoint of the model alone, readable at any layout

``python -m hybridflow.replay`` runs that update again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from hybridflow.algorithms.contract import Counts
from hybridflow.batch.batch import Batch, concat
from hybridflow.config.root import PPOConfig
from hybridflow.engines.train.base import TrainEngine
from hybridflow.utils.errors import DataError, NotFiniteError

logger = logging.getLogger(__name__)

FOLDER = "bad_updates"
COUNT = "skipped_updates.json"
ABOUT = "update.json"
WEIGHTS = "weights"
MODEL = ("model",)


class Skips:
    """The count of one role on one rank; equal on all ranks, since all skip together.

    Args:
        role: whose updates.
        rank: of this process.
        config: the whole configuration; ``trainer.max_skipped_updates`` is the limit.
        source: arguments that the role's worker was built with, beside the configuration and the layout.
    """

    def __init__(self, role: str, *, rank: int, config: PPOConfig, source: Mapping[str, Any]) -> None:
        self.role = role
        self._rank = rank
        self._config = config
        self._source = dict(source)
        self._in_a_row = 0

    def note(self, skipped: bool, engine: TrainEngine, rows: Batch, counts: Counts, *, step: int, number: int) -> None:
        """Counts one update that had tokens to learn from. Collective.

        Raises:
            NotFiniteError: on every rank, when it is the last that ``trainer.max_skipped_updates`` allows.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        limit = self._config.trainer.max_skipped_updates
        if limit is None or self._in_a_row < limit:
            return
        folder = Path(self._config.trainer.default_local_dir) / FOLDER / f"{self.role}_step_{step}_update_{number}"
        self._write(folder, engine, rows, counts, step=step, number=number)
        raise NotFiniteError(
            f"{self.role}: the loss or its gradient was not finite in {limit} updates in a row, the last in step "
            f"{step} (trainer.max_skipped_updates={limit}). All were skipped: weights and moments are those before. "
            f"The last one is in {folder}; python -m hybridflow.replay {folder} names the operation and the rows"
        )

    def save(self, folder: Path) -> None:
        """Writes the count beside the role's checkpoint in ``folder``."""
        if self._rank == 0:
            (folder / COUNT).write_text(json.dumps({"in_a_row": self._in_a_row}))

    def load(self, folder: Path) -> None:
        """Goes on from what ``save`` wrote."""
        if (folder / COUNT).exists():
            self._in_a_row = int(json.loads((folder / COUNT).read_text())["in_a_row"])
        else:
            logger.warning("%s was saved without the count of skipped updates: it starts anew", folder)

    def _write(self, folder: Path, engine: TrainEngine, rows: Batch, counts: Counts, *, step: int, number: int) -> None:
        if self._rank == 0:
            if folder.exists():  # of a run that came here before, with other ranks perhaps
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        engine.finish_save()  # one that is being written in the background must end before another begins
        engine.save(str(folder / WEIGHTS), contents=MODEL)
        if self._rank in engine.dims.collect_ranks():
            tensors = {name: value.contiguous() for name, value in rows.tensors().items()}
            save_file(tensors, folder / f"rows_{self._rank}.safetensors")
        if self._rank == 0:
            about = {
                "role": self.role,
                "step": step,
                "number": number,
                "counts": dataclasses.asdict(counts),
                "source": self._source,
                "files": [f"rows_{rank}.safetensors" for rank in engine.dims.collect_ranks()],
                "config": dataclasses.asdict(self._config),
            }
            (folder / ABOUT).write_text(json.dumps(about, default=str, indent=1))
        engine.largest(0.0)  # no rank goes on, to raise, before all have written


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BadUpdate:
    """An update that was written out."""

    folder: Path
    role: str
    step: int
    number: int
    counts: Counts
    source: Mapping[str, Any]
    """Arguments of the role's worker beside configuration and layout."""
    config: Mapping[str, Any]
    """The configuration's tree."""
    rows: Batch
    """The mini-batch of all ranks."""


def read_bad_update(folder: Path) -> BadUpdate:
    """What ``Skips`` wrote.

    Raises:
        DataError: the folder is no such folder, or is incomplete.
    """
    if not (folder / ABOUT).is_file():
        raise DataError(f"{folder} holds no update: {ABOUT} is missing. Give a folder below {FOLDER}/ of the run")
    about = json.loads((folder / ABOUT).read_text())
    missing = [name for name in about["files"] if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} is incomplete: {', '.join(missing)} missing. Collect the files of all nodes there")
    parts = [Batch(load_file(folder / name)) for name in about["files"]]
    filled = [part for part in parts if len(part)]
    return BadUpdate(
        folder=folder,
        role=about["role"],
        step=about["step"],
        number=about["number"],
        counts=Counts(**about["counts"]),
        source=about["source"],
        config=about["config"],
        rows=concat(filled or parts[:1]),
    )
