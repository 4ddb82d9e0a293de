"""Layouts to boxes: what each rank owns in training and needs in generation, from names and shapes alone.

Training shards flat over FSDP ranks; where the boundaries of those shards lie decides how much a rank already has of
what its generator needs. With the *permuted* order, shard ``s(r) = (r mod t) N/t + r div t`` lives on rank r, so the
ranks that share a tensor-parallel coordinate own consecutive shards, and every shard lies inside its own rank's slice
(N = 8, t = 2, a column-parallel weight):

    rows      0    1    2    3  |  4    5    6    7
    plain     r0   r1   r2   r3 |  r4   r5   r6   r7      rank 1 needs rows 4..7 and owns none of them
    permuted  r0   r2   r4   r6 |  r1   r3   r5   r7      rank 1 needs rows 4..7 and owns row 4
    needed by      r0 r2 r4 r6  |      r1 r3 r5 r7

Row-parallel weights are cut along dim 1 in generation, so they are sharded along dim 1 in training too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridflow.hybrid_engine.boxes import (
    Box,
    BoxTable,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    full_box,
    local_box,
    volume,
)
from hybridflow.hybrid_engine.plan import Slice, intern, permuted_order
from hybridflow.hybrid_engine.rules import Heads, Place, ShardingRule, generation_boxes, rule_for
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """All that a plan must know of a model."""

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    """Full shape by Hugging Face name; tied copies once."""
    heads: Heads
    layers: int


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """How the trainer shards: the mesh, and which FSDP rank holds which shard."""

    dims: ParallelDims
    shard_order: tuple[int, ...] | None = None
    """``shard_order[s]``: position in the FSDP group that holds shard s; None: in order."""
    row_parallel_shard_dim1: bool = False
    """Whether row-parallel weights are sharded along dim 1 where that divides."""

    def __post_init__(self) -> None:
        if self.shard_order is not None and sorted(self.shard_order) != list(range(self.shards)):
            raise ConfigError(f"shard_order must list each of {self.shards} FSDP ranks once, not {self.shard_order}")

    @staticmethod
    def permuted(dims: ParallelDims, rollout_tp: int) -> TrainingLayout:
        """The layout whose shards lie inside the generator's slices (pure FSDP or HSDP, no tensor parallelism)."""
        order = permuted_order(dims.dp_shard * dims.sp, rollout_tp)
        return TrainingLayout(dims=dims, shard_order=order, row_parallel_shard_dim1=True)

    @staticmethod
    def for_rollout(dims: ParallelDims, rollout_tp: int) -> TrainingLayout:
        """The actor's layout: permuted where data parallelism is all there is and ``rollout_tp`` divides its shards."""
        if dims.dp_replicate * dims.dp_shard == dims.world and dims.dp_shard % rollout_tp == 0:
            return TrainingLayout.permuted(dims, rollout_tp)
        return TrainingLayout(dims=dims)

    @property
    def rank_order(self) -> tuple[int, ...] | None:
        """``order[i * S + s]``: rank that holds shard s of S in HSDP replica i; None: in order of rank.

        Only for data parallelism alone: the ranks of a replica are then neighbours.
        """
        if self.shard_order is None:
            return None
        replicas = range(self.dims.dp_replicate)
        return tuple(replica * self.shards + position for replica in replicas for position in self.shard_order)

    @property
    def shards(self) -> int:
        """FSDP shards of a parameter: dp_shard x sp."""
        return self.dims.dp_shard * self.dims.sp

    @cached_property
    def shard_of(self) -> tuple[int, ...]:
        """Shard index by position in the FSDP group."""
        order = self.shard_order or tuple(range(self.shards))
        found = [0] * self.shards
        for shard, position in enumerate(order):
            found[position] = shard
        return tuple(found)

    def placements(self, name: str, shape: tuple[int, ...], rule: ShardingRule) -> tuple[Placement, Placement]:
        """Placement on the FSDP axis and on the tp axis, as DTensor has them."""
        tp_dim = rule.trainer_dim if self.dims.tp > 1 and (rule.trainer_dim or 0) < len(shape) else None
        tp = Replicate() if tp_dim is None else Shard(tp_dim)
        if not shape or self.shards == 1:
            return Replicate(), tp
        along_1 = rule.cut == "row" and len(shape) == 2 and shape[1] % self.shards == 0 and tp_dim != 1
        if self.row_parallel_shard_dim1 and along_1:
            return Shard(1), tp
        return (StridedShard(0, self.dims.tp) if tp_dim == 0 else Shard(0)), tp


def training_table(
    name: str, shape: tuple[int, ...], layout: TrainingLayout, rule: ShardingRule, stages: tuple[int, ...] = (0,)
) -> BoxTable:
    """What every rank owns of one parameter; replicas of HSDP own the same.

    Args:
        name: Hugging Face name.
        shape: full shape.
        layout: training layout.
        rule: sharding rule of the parameter.
        stages: pipeline stages that hold it.
    """
    fsdp, tp = layout.placements(name, shape, rule)
    dims = layout.dims
    blocks: dict[tuple[int, int], Box | None] = {}
    table: list[Box | None] = []
    for rank in range(dims.world):
        at = dims.coordinates(rank)
        if at["pp"] not in stages:
            table.append(None)
            continue
        shard = layout.shard_of[at["dp_shard"] * dims.sp + at["sp"]]
        key = shard, at["tp"]
        if key not in blocks:
            box = local_box(shape, [(layout.shards, shard, fsdp), (dims.tp, at["tp"], tp)])
            blocks[key] = box if volume(box) else None
        table.append(blocks[key])
    return tuple(table)


def generation_tables(
    name: str,
    shape: tuple[int, ...],
    layout: ParallelDims,
    rule: ShardingRule,
    heads: Heads,
    *,
    expert_parallel: bool = False,
) -> tuple[BoxTable, ...]:
    """What every rank needs of one parameter: one table per block that a rank holds.

    Args:
        name: Hugging Face name.
        shape: full shape.
        layout: generation layout, ``ParallelDims(dp_shard=replicas, tp=t)``.
        rule: sharding rule of the parameter.
        heads: attention heads.
        expert_parallel: whether ranks hold whole experts.
    """
    per_rank = [
        generation_boxes(
            rule, name, shape, Place(tp=layout.tp, tp_rank=j, heads=heads), expert_parallel=expert_parallel
        )
        for j in range(layout.tp)
    ]
    tables = []
    for slot in range(len(per_rank[0])):
        boxes = [found[slot] if volume(found[slot]) else None for found in per_rank]
        tables.append(tuple(boxes[rank % layout.tp] for rank in range(layout.world)))
    return tuple(tables)


def predict(
    model: ModelShapes,
    training: TrainingLayout,
    generation: ParallelDims,
    *,
    dtype: str = "bfloat16",
    itemsize: int = 2,
    expert_parallel: bool = False,
) -> list[Slice]:
    """Slices of all parameters for a pair of layouts over the same ranks, without a process or a tensor.

    Raises:
        ConfigError: when the layouts have different worlds, or the generator cannot cut the model so.
    """
    if training.dims.world != generation.world:
        raise ConfigError(
            f"training takes {training.dims.world} ranks and generation {generation.world} "
            f"({generation.dp} replicas of tp={generation.tp}): colocated layouts need the same ranks"
        )
    known: dict[tuple, tuple[BoxTable, tuple[BoxTable, ...]]] = {}
    slices = []
    for name, shape in model.shapes.items():
        rule = rule_for(model.architecture, name)
        stages = _stages(name, model.layers, training.dims.pp)
        key = shape, rule, stages
        if key not in known:
            owned = training_table(name, shape, training, rule, stages)
            needed = generation_tables(name, shape, generation, rule, model.heads, expert_parallel=expert_parallel)
            known[key] = owned, needed
        owned, needed = known[key]
        slices += [Slice(name, slot, dtype, itemsize, owned, table) for slot, table in enumerate(needed)]
    return _interned(slices)


def generation_difference(
    model: ModelShapes, held: Mapping[str, tuple[Box, ...]], *, tp: int, tp_rank: int, expert_parallel: bool = False
) -> list[str]:
    """How an engine's real blocks differ from what the rules predict; empty when they agree.

    Args:
        model: the model.
        held: blocks by Hugging Face name, as the engine reports them (``EngineParameters``).
        tp: tensor-parallel size of the engine.
        tp_rank: this rank's coordinate.
        expert_parallel: whether ranks hold whole experts.
    """
    place = Place(tp=tp, tp_rank=tp_rank, heads=model.heads)
    lines = []
    for name in dict.fromkeys([*model.shapes, *held]):
        if name not in model.shapes:
            lines.append(f"{name}: the engine holds {held[name]}, the model has no such parameter")
            continue
        rule = rule_for(model.architecture, name)
        boxes = generation_boxes(rule, name, model.shapes[name], place, expert_parallel=expert_parallel)
        expected = tuple(box for box in boxes if volume(box))
        found = tuple(box for box in held.get(name, ()) if volume(box))
        if tp == 1 and found == (full_box(model.shapes[name]),):
            continue  # an engine on one rank may hold in one block what a fused layer holds in two
        if sorted(found) != sorted(expected):
            lines.append(
                f"{name}: the rule {rule.cut!r} predicts {expected} at tp={tp} rank {tp_rank}, the engine holds {found}"
            )
    return lines


def _stages(name: str, layers: int, pp: int) -> tuple[int, ...]:
    """Pipeline stages that hold a parameter: layers in contiguous equal runs, embeddings first, the rest last."""
    found = re.search(r"layers\.(\d+)\.", name)
    if found:
        return (int(found[1]) * pp // layers,)
    return (0,) if "embed_tokens" in name else (pp - 1,)


def _interned(slices: list[Slice]) -> list[Slice]:
    """The same slices with equal tables made one object."""
    distinct = {id(table): table for piece in slices for table in (piece.owned, piece.needed)}
    same = intern(distinct)
    return [
        Slice(piece.name, piece.slot, piece.dtype, piece.itemsize, same[id(piece.owned)], same[id(piece.needed)])
        for piece in slices
    ]
