"""Process groups of a training engine, made from ``ParallelDims``.

Parameters are sharded over dp_shard x sp jointly (sequence-parallel ranks hold different tokens of the same rows, so
their gradients add up like those of data-parallel ranks) and replicated over dp_replicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridflow.topology.parallel import AXES, ParallelDims
from hybridflow.utils.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The meshes of one rank; None where an axis has degree 1."""

    rank: int
    fsdp: DeviceMesh | None
    """1-D (shard) or 2-D (replicate, shard)."""
    tp: DeviceMesh | None
    sp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None

    @property
    def reduced_over(self) -> int:
        """Ranks whose gradients FSDP averages."""
        return 1 if self.fsdp is None else self.fsdp.size()

    @property
    def exchange_activations(self) -> list[dist.ProcessGroup]:
        """Groups in which layers exchange activations by collectives: those of tensor and sequence parallelism."""
        tp = [] if self.tp is None else [self.tp.get_group()]
        return tp if self.sp is None else [*tp, self.sp]


def meshes(dims: ParallelDims, device_type: str, shard_order: Sequence[int] | None, *, always_fsdp: bool) -> Meshes:
    """The meshes of this rank. Collective: every rank calls it with equal arguments.

    Args:
        dims: degrees; their product is the world.
        device_type: ``cpu`` or ``cuda``.
        shard_order: ``order[i * S + s]`` is the rank with shard index s in replica i (S shards); None: by rank.
        always_fsdp: whether one rank gets a mesh too (mixed precision is FSDP's).

    Raises:
        EngineError: when torch.distributed is not initialised, has another size, or the order is no permutation.
    """
    if not dist.is_initialized():
        if dims.world == 1 and not always_fsdp:
            return Meshes(rank=0, fsdp=None, tp=None, sp=None, pp=None)
        raise EngineError(
            f"a training engine over {dims.world} rank(s) needs torch.distributed to be initialised first"
        )
    world, rank = dist.get_world_size(), dist.get_rank()
    if world != dims.world:
        raise EngineError(f"layout {dims.degrees} is for {dims.world} ranks, the process group has {world}")
    if dims.world == 1 and not always_fsdp:
        return Meshes(rank=rank, fsdp=None, tp=None, sp=None, pp=None)
    if shard_order is not None:
        return _permuted(dims, device_type, list(shard_order), rank)
    base = init_device_mesh(device_type, tuple(dims.degrees.values()), mesh_dim_names=AXES)
    return Meshes(
        rank=rank,
        fsdp=_fsdp_mesh(base, dims, always_fsdp),
        tp=base["tp"] if dims.tp > 1 else None,
        sp=base["sp"].get_group() if dims.sp > 1 else None,
        pp=base["pp"].get_group() if dims.pp > 1 else None,
    )


def _fsdp_mesh(base: DeviceMesh, dims: ParallelDims, always: bool) -> DeviceMesh | None:
    shards = dims.dp_shard * dims.sp
    if shards * dims.dp_replicate == 1 and not always:
        return None
    shard = base["dp_shard"] if dims.sp == 1 else base["dp_shard", "sp"]._flatten("fsdp_shard")
    if dims.dp_replicate == 1:
        return shard
    if dims.sp == 1:
        return base["dp_replicate", "dp_shard"]
    return base["dp_replicate", "fsdp_shard"]


def _permuted(dims: ParallelDims, device_type: str, order: list[int], rank: int) -> Meshes:
    if sorted(order) != list(range(dims.world)):
        raise EngineError(f"shard_order {order} is no permutation of ranks 0..{dims.world - 1}")
    if dims.pp * dims.tp * dims.sp > 1:
        raise EngineError(f"shard_order works with data parallelism alone, got {dims.degrees}")
    table = torch.tensor(order).view(dims.dp_replicate, dims.dp_shard)
    # ``DeviceMesh(device, table)`` would sort the ranks inside each group: FSDP's shard index and DTensor's coordinates
    # would then disagree silently. Groups in the stated order, made by every rank in one order, keep them equal.
    shard = _own_group([list(row) for row in table.tolist()], rank)
    if dims.dp_replicate == 1:
        fsdp = DeviceMesh.from_group(shard, device_type, mesh=table[0], mesh_dim_names=("dp_shard",))
    else:
        replicate = _own_group([list(column) for column in table.t().tolist()], rank)
        fsdp = DeviceMesh.from_group(
            [replicate, shard], device_type, mesh=table, mesh_dim_names=("dp_replicate", "dp_shard")
        )
    return Meshes(rank=rank, fsdp=fsdp, tp=None, sp=None, pp=None)


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup:
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks, sort_ranks=False)
        if rank in ranks:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine
