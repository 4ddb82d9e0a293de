"""Ranks as coordinates on named mesh axes: integers only, no torch.

A generation layout is written the same way: ``ParallelDims(dp_shard=replicas, tp=t)``.

Order of axes, outermost first: pp, dp_replicate, dp_shard, sp, tp. Ranks that differ only in tp are neighbours, so a
tensor-parallel group lies inside one machine whenever it fits there. *dp* is dp_replicate x dp_shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hybridflow.utils.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of every mesh axis; their product is the world size."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ConfigError(f"parallel degree {axis}={getattr(self, axis)} must be at least 1")

    @cached_property
    def degrees(self) -> dict[str, int]:
        """Degree by axis, outermost first."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "sp": self.sp,
            "tp": self.tp,
        }

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.sp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel coordinates: rows are split over these."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of ``rank`` on every axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world}")
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.degrees[axis])
        return {axis: found[axis] for axis in AXES}

    def rank(self, *, pp: int = 0, dp: int = 0, sp: int = 0, tp: int = 0) -> int:
        """Rank at these coordinates; ``dp`` counts over dp_replicate x dp_shard."""
        return ((pp * self.dp + dp) * self.sp + sp) * self.tp + tp

    def dp_coordinate(self, rank: int) -> int:
        """Which block of rows ``rank`` works on."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def collect_ranks(self) -> tuple[int, ...]:
        """The rank that answers for each data-parallel coordinate: last stage, sp 0, tp 0."""
        return tuple(self.rank(pp=self.pp - 1, dp=coordinate) for coordinate in range(self.dp))
