"""Why an optimizer step was skipped: the first row and column that are not finite, in the log of their rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from hybridflow.algorithms.contract import Loss
from hybridflow.batch.batch import Batch
from hybridflow.engines.train.base import MicroBatching, TrainEngine

logger = logging.getLogger(__name__)

MASK = "loss_mask"


def first_bad(rows: Batch, outputs: Mapping[str, Tensor] | None = None) -> str | None:
    """The first number that is not finite where ``loss_mask`` is True, in words; None: all are finite.

    Columns are looked at before the model's ``outputs`` (``[b, T]`` by name): a bad column makes bad outputs too, never
    the other way round. ``row_index`` names the row in the batch of the step.
    """
    mask = rows[MASK]
    shown = {f"column {name}": value for name, value in rows.tensors().items()}
    shown |= {f"the model's {name}": value for name, value in (outputs or {}).items()}
    for name, value in shown.items():
        if not value.is_floating_point() or value.shape != mask.shape:
            continue
        bad = (mask & ~value.isfinite()).nonzero()
        if len(bad):
            row, token = bad[0].tolist()
            number = int(rows["row_index"][row]) if "row_index" in rows else row
            return f"row {number} of the batch, {name}, response token {token}: {float(value[row, token])}"
    return None


def explain_skip(
    engine: TrainEngine, rows: Batch, loss: Loss, *, temperature: float, micro: MicroBatching, where: str
) -> None:
    """Logs what made the loss or gradient of a mini-batch non-finite.

    Collective: every rank calls it after the same skipped step, because the model is run once more without gradient.
    """
    outputs = engine.forward(rows, loss.needs, temperature=temperature, micro=micro)
    found = first_bad(rows, outputs)
    if found is not None:
        logger.warning("%s was skipped: %s", where, found)
        return
    logger.warning(
        "%s was skipped: all columns and outputs of this rank's %d rows are finite, so the gradient overflowed, or "
        "another rank's rows are at fault; trainer.anomaly_detection=True names the operation",
        where,
        len(rows),
    )
