"""What stops at a chosen place of a job and neither works nor dies: a rank in an update, in generation, a data set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.workers.rollout import RolloutWorker

SECONDS = 300.0
STOPPING = 1
"""The rank that stops."""
STOPS_AFTER = 3
"""Engine steps."""


def loss_of_a_rank_that_stops(*, log_probs, old_log_probs, mask, **columns):
    """A policy loss that one rank never finishes: its peers wait for it where gradients are reduced."""
    if dist.get_rank() == STOPPING:
        time.sleep(SECONDS)
    return torch.where(mask, -(log_probs - old_log_probs).exp(), 0.0), {}


class StoppingRollout(RolloutWorker):
    """A generator of which one rank stops stepping."""

    def _between_steps(self) -> None:
        super()._between_steps()
        if self._context.rank == STOPPING and self._steps == STOPS_AFTER:
            time.sleep(SECONDS)


def rows_that_do_not_come(source: str, **_: Any) -> Iterator[Any]:
    """A data set behind a disk that does not answer."""
    time.sleep(SECONDS)
    yield from ()
