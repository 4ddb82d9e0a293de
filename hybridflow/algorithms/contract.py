"""The loss contract between algorithms and training engines.

A loss is a pure function of (model outputs of a micro-batch, its rows, *global* counts of the whole mini-batch over all
ranks). It returns a **sum** already divided by those counts, so that adding micro-batches and ranks gives the loss of
the whole mini-batch however it was cut. The mask of every loss is the column ``loss_mask``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridflow.batch.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Sizes of one mini-batch over all data-parallel ranks; what losses divide by."""

    tokens: int
    """Tokens where ``loss_mask`` is True."""
    sequences: int
    """Rows with at least one such token."""
    rows: int
    """All rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What the model said about the response tokens of a micro-batch, ``[b, T]`` with gradient; None: not asked for."""

    log_probs: Tensor | None = None
    """Nats, of the tempered distribution."""
    entropy: Tensor | None = None
    """Nats, of the tempered distribution."""
    values: Tensor | None = None
    """Return expected before each response token."""
    full_kl: Tensor | None = None
    """Nats, exact KL(policy || reference) over the vocabulary (``models/full_kl.py``), tempered."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that can be combined over micro-batches and ranks without bias.

    ``sum``: parts add up. ``mean``: value is a numerator, weight its denominator. ``max`` / ``min``: as they say.
    """

    value: Tensor | float
    weight: Tensor | float = 1.0
    how: str = "mean"


@runtime_checkable
class Loss(Protocol):
    """A loss of one micro-batch."""

    needs: frozenset[str]
    """Fields of ``Outputs`` that it reads: log_probs, entropy, values, full_kl."""

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, Mapping[str, Metric]]:
        """Scalar loss (a share of the whole mini-batch's) and metrics (shares too, see ``Metric``)."""
        ...
