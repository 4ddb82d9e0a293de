"""Pools of slots and the layouts that roles take on them: integers and names only.

A slot is one process and one device. The same pool for two roles means that they share processes; different pools run
at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError

MAIN_POOL = "main"
"""The pool of actor and rollout, and of every role that has no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Slots per node, and who lives there."""

    name: str
    slots: tuple[int, ...]
    roles: tuple[str, ...]

    @property
    def world(self) -> int:
        """Slots in all."""
        return sum(self.slots)


def training_layout(
    world: int, *, pp: int = 1, sp: int = 1, tp: int = 1, shard: int = -1, zero_stage: int | None = None
) -> ParallelDims:
    """Layout of a training role on ``world`` ranks.

    Args:
        world: ranks of its pool.
        pp: pipeline stages.
        sp: sequence-parallel ranks.
        tp: tensor-parallel ranks.
        shard: data-parallel ranks over which parameters are sharded; -1, or at least all of them: no replicas.
        zero_stage: 0 replicates parameters on every data-parallel rank.

    Raises:
        ConfigError: a degree does not divide what it has to divide.
    """
    replica = pp * sp * tp
    if world % replica:
        raise ConfigError(f"pp={pp} x sp={sp} x tp={tp} does not divide {world} ranks")
    dp = world // replica
    if zero_stage == 0:
        return ParallelDims(pp=pp, dp_replicate=dp, dp_shard=1, sp=sp, tp=tp)
    if shard < 0 or shard >= dp:
        return ParallelDims(pp=pp, dp_shard=dp, sp=sp, tp=tp)
    if dp % shard:
        raise ConfigError(f"a shard group of {shard} ranks does not divide {dp} data-parallel ranks")
    return ParallelDims(pp=pp, dp_replicate=dp // shard, dp_shard=shard, sp=sp, tp=tp)


def generation_layout(world: int, *, tp: int) -> ParallelDims:
    """Layout of the generator: as many replicas of ``tp`` ranks as fit.

    Raises:
        ConfigError: ``tp`` does not divide ``world``.
    """
    if world % tp:
        raise ConfigError(f"a generator of tp={tp} does not divide {world} ranks")
    return ParallelDims(dp_shard=world // tp, tp=tp)
