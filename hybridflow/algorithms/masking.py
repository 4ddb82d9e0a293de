"""Reductions over masked tokens and over groups of rows; every estimator and loss reduces through this file.

Two rules keep garbage out. A mask selects (``torch.where``), it never multiplies: ``0 * nan`` is nan. And statistics of
scores are float64 sums with an exact test for "no spread" (max equals min), because equal scores that are not exact in
binary have a tiny, meaningless standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK_ELEMENTS = 1 << 17
"""Elements that are widened to float64 at a time."""


def keep(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``values`` where ``mask`` is True, 0 elsewhere; the gradient at dropped positions is exactly 0.

    Quantities that can overflow (``exp`` of a log-ratio) need their *input* masked: a where after the exponential would
    still multiply an infinite derivative by 0.

    Raises:
        TypeError: ``mask`` is not boolean (another column was passed in its place).
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask must be a bool tensor, got {mask.dtype}: was another column passed as mask?")
    return torch.where(mask, values, 0.0)


def masked_sum(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None) -> Tensor:
    """Sum over positions where ``mask`` is True, in the dtype of ``values``; 0 where there are none."""
    kept = keep(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None) -> Tensor:
    """Mean over positions where ``mask`` is True; 0 (never nan) where there are none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_moments(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (n - 1) over masked positions as float64 scalars; variance 0 for fewer than two.

    The squares are taken after centring, so a large mean costs no digits: every block of rows around its own mean while
    it lies in the cache, and blocks are joined by the shift of their means (Chan et al., 1979).
    """
    mean, squares, count = _zero(values), _zero(values), 0
    for part, live in row_blocks(values, mask):
        size = int(live.sum())
        if size == 0:
            continue
        kept = keep(part, live).double()
        own = kept.sum() / size
        centred = keep(kept.sub_(own), live).flatten()
        shift, count = own - mean, count + size
        squares = squares + centred.dot(centred) + shift.square() * ((count - size) * size / count)
        mean = mean + shift * (size / count)
    return mean, squares / max(count - 1, 1)


def masked_whiten(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, shift_mean: bool = True, epsilon: float = 1e-8
) -> Float[Tensor, "*shape"]:
    """``(values - mean) / sqrt(variance + epsilon)`` over masked positions, 0 elsewhere (unbiased variance).

    ``shift_mean=False`` scales only and keeps the mean.
    """
    if not _has_spread(values, mask):
        return torch.zeros_like(values) if shift_mean else keep(values, mask)
    mean, variance = masked_moments(values, mask)
    scale = torch.rsqrt(variance + epsilon)
    white = torch.empty_like(values)
    for (part, live), out in zip(row_blocks(values, mask), white.split(block_rows(values)), strict=True):
        centred = (part.double() - mean).mul_(scale)
        out.copy_(keep(centred if shift_mean else centred.add_(mean), live))
    return white


def _has_spread(values: Tensor, mask: Tensor) -> bool:
    """Whether two masked positions differ; exact, and soon known where they do."""
    first: Tensor | None = None
    for part, live in row_blocks(values, mask):
        if not bool(live.any()):
            continue
        if first is None:
            first = part.flatten()[live.flatten().byte().argmax()]
        if bool((live & (part != first)).any()):
            return True
    return False


def block_rows(values: Tensor) -> int:
    """Rows that are small enough to be widened to float64 within a cache."""
    return max(BLOCK_ELEMENTS // max(values[:1].numel(), 1), 1)


def row_blocks(values: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors in blocks of ``block_rows`` rows."""
    rows = block_rows(values)
    return zip(values.split(rows), mask.split(rows), strict=True)


def _zero(values: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=values.device)


def last_true(mask: Bool[Tensor, "B T"]) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """Position of the last True of each row (0 where there is none), and whether there is one."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    found = mask.any(dim=1)
    last = torch.where(mask, positions, 0).amax(dim=1) if mask.shape[1] else torch.zeros_like(found, dtype=torch.int64)
    return last, found


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by group; rows that are not present belong to a group but count in none of its statistics."""

    index: Int[Tensor, " B"]
    """Dense group number of each row."""
    present: Bool[Tensor, " B"]
    """Rows that count."""
    size: Int[Tensor, " G"]
    """Present rows of each group."""

    @classmethod
    def of(cls, group_id: Int[Tensor, " B"], present: Bool[Tensor, " B"]) -> Groups:
        """Groups by equal ``group_id``, wherever the rows stand."""
        names, index = torch.unique(group_id, return_inverse=True)
        size = torch.zeros(len(names), dtype=torch.int64, device=index.device).index_add_(0, index, present.long())
        return cls(index=index, present=present, size=size)

    def sum(self, values: Float[Tensor, " B"]) -> Float[Tensor, " G"]:
        """Sum of present rows by group, float64."""
        total = torch.zeros(len(self.size), dtype=torch.float64, device=values.device)
        return total.index_add_(0, self.index, keep(values.double(), self.present))

    def mean(self, values: Float[Tensor, " B"]) -> Float[Tensor, " G"]:
        """Mean of present rows by group, float64; 0 for an empty group."""
        return self.sum(values) / self.size.clamp(min=1)

    def has_spread(self, values: Float[Tensor, " B"]) -> Bool[Tensor, " G"]:
        """Whether a group holds two present rows with different values; exact, no tolerance."""
        groups = len(self.size)
        highest = torch.full((groups,), float("-inf"), dtype=torch.float64, device=values.device)
        lowest = -highest
        high = torch.where(self.present, values.double(), float("-inf"))
        low = torch.where(self.present, values.double(), float("inf"))
        highest = highest.scatter_reduce(0, self.index, high, "amax")
        lowest = lowest.scatter_reduce(0, self.index, low, "amin")
        return highest > lowest

    def centred(self, values: Float[Tensor, " B"], centre: Float[Tensor, " G"] | None = None) -> Float[Tensor, " B"]:
        """``values`` minus their group's mean (or ``centre``), float64; exactly 0 without spread or absent."""
        centre = self.mean(values) if centre is None else centre
        spread = self.present & self.has_spread(values)[self.index]
        return keep(values.double() - centre[self.index], spread)

    def std(self, values: Float[Tensor, " B"]) -> Float[Tensor, " G"]:
        """Unbiased standard deviation (n - 1) by group, float64; exactly 0 without spread."""
        return (self.sum(self.centred(values).square()) / (self.size - 1).clamp(min=1)).sqrt()
