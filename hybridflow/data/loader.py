"""``PromptLoader``: endless batches of training prompts whose position fits in a checkpoint.

An epoch is one shuffled pass. Its last ``len(dataset) % batch_size`` prompts do not fill a batch and are left out of
that epoch; with shuffling they are others each time. Every batch has exactly ``batch_size`` prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hybridflow.batch.batch import Batch
from hybridflow.data.dataset import PromptDataset
from hybridflow.utils.errors import DataError

logger = logging.getLogger(__name__)


class PromptLoader:
    """Endless training batches.

    Args:
        dataset: where prompts come from.
        batch_size: prompts per batch.
        seed: of the order; epoch e's order depends on (seed, e) alone.
        shuffle: whether the order is drawn anew each epoch.

    Raises:
        DataError: when the dataset does not fill one batch.
    """

    def __init__(self, dataset: PromptDataset, *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if len(dataset) < batch_size:
            raise DataError(
                f"the training set has {len(dataset)} prompts ({dataset.dropped} were dropped as over-long), fewer "
                f"than one batch of data.train_batch_size={batch_size}: lower it, or give more data"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._drawn = 0
        self._order = self._order_of(0)
        rest = len(dataset) % batch_size
        if rest and not shuffle:
            logger.warning("the last %d of %d prompts never fill a batch and data.shuffle is off: they are not used",
                           rest, len(dataset))  # fmt: skip

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._dataset) // self._batch_size

    def __iter__(self) -> Iterator[Batch]:
        """Endless: the rest of this epoch, then the next ones."""
        while True:
            yield self.next_batch()

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete."""
        return self._epoch

    def next_batch(self) -> Batch:
        """The next ``batch_size`` prompts; ``group_id`` numbers prompts as they are drawn over the whole run."""
        rows = self._order[self._position : self._position + self._batch_size].tolist()
        batch = self._dataset.batch(rows, group_ids=range(self._drawn, self._drawn + len(rows)))
        self._drawn += len(rows)
        self._position += len(rows)
        if self._position + self._batch_size > len(self._dataset):
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Position: epoch, prompts taken of it, prompts drawn in the run, seed and the dataset's fingerprint."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "drawn": self._drawn,
            "seed": self._seed,
            "fingerprint": self._dataset.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position and keeps its seed, so that the order goes on; another batch size is fine.

        A position in another dataset means nothing in this one: it starts at its beginning, with a warning.
        """
        self._drawn = state["drawn"]
        if state["fingerprint"] == self._dataset.fingerprint():
            self._epoch, self._position, self._seed = state["epoch"], state["position"], state["seed"]
            if self._position + self._batch_size > len(self._dataset):
                self._epoch, self._position = self._epoch + 1, 0
        else:
            logger.warning(
                "the checkpoint was made on another training set (%d prompts of epoch %d were used): this one starts "
                "at its first prompt",
                state["position"],
                state["epoch"],
            )
            self._epoch, self._position = 0, 0
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._dataset))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._dataset))


def validation_batches(dataset: PromptDataset, batch_size: int | None = None) -> Iterator[Batch]:
    """Every row exactly once, in order, the last partial batch included; None: all rows in one batch."""
    size = batch_size or max(1, len(dataset))
    for start in range(0, len(dataset), size):
        positions = range(start, min(start + size, len(dataset)))
        yield dataset.batch(positions, group_ids=positions)
