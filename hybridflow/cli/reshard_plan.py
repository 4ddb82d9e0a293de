"""What ``python -m hybridflow.reshard`` prints: the plan of every rank against the bound, and the check of a model."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.hybrid_engine.layouts import ModelShapes, TrainingLayout, predict
from hybridflow.hybrid_engine.plan import RankPlan, Slice, bound_bytes, ideal_bytes, plan_rank, tables_digest
from hybridflow.hybrid_engine.rehearse import rehearse
from hybridflow.hybrid_engine.rules import register_rules, rule_for
from hybridflow.hybrid_engine.shapes import load_config, model_shapes
from hybridflow.models.weight_files import WeightFiles
from hybridflow.topology.parallel import AXES, ParallelDims
from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load

ALL_RANKS_UP_TO = 16
"""Worlds up to this size are planned and printed rank by rank; of larger ones, a few ranks."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def table(chosen: argparse.Namespace) -> int:
    """Prints the plan of every rank (or some), and the totals."""
    model = model_shapes(load_config(chosen.model))
    train = _dims("--train", chosen.train, AXES)
    rollout = _dims("--rollout", chosen.rollout, ("tp",))
    if train.world % rollout.tp:
        raise ConfigError(f"--rollout tp={rollout.tp} does not divide the {train.world} ranks of --train")
    if chosen.explain is not None and not 0 <= chosen.explain < train.world:
        raise ConfigError(f"--explain {chosen.explain}: ranks are 0 to {train.world - 1}")
    generation = ParallelDims(dp_shard=train.world // rollout.tp, tp=rollout.tp)
    training = _training_layout(train, rollout.tp, chosen.order)
    dtype = DTYPES[chosen.dtype]
    itemsize = getattr(torch, dtype).itemsize
    started = time.perf_counter()
    slices = predict(
        model, training, generation, dtype=dtype, itemsize=itemsize, expert_parallel=chosen.expert_parallel
    )
    predicted = time.perf_counter() - started
    _print_heading(chosen.model, model, training, generation, slices)
    ranks = _shown_ranks(train.world)
    plans, slowest = _print_ranks(slices, ranks, chosen.ranks_per_node)
    _print_totals(slices, training, generation, plans, chosen.bucket_mb << 20)
    print(f"layouts of {train.world} ranks in {predicted:.2f} s, the slowest plan of a rank in {slowest:.2f} s")
    print(f"plan {tables_digest(slices)[:16]}")
    if chosen.explain is not None:
        print()
        print(plan_rank(slices, chosen.explain, ranks_per_node=chosen.ranks_per_node).describe(slices))
    return 0


def check(chosen: argparse.Namespace) -> int:
    """Whether a model can be resharded: every parameter has a rule, cuts divide, a rehearsal gives the original."""
    model = model_shapes(load_config(chosen.model))
    if chosen.rules is not None:
        register_rules(model.architecture, load(chosen.rules))
    counts = Counter(
        (rule.cut, rule.stored_in) for rule in (rule_for(model.architecture, name) for name in model.shapes)
    )
    print(f"{model.architecture}: {len(model.shapes)} parameters, all covered by a rule")
    for (cut, stored_in), count in sorted(counts.items()):
        print(f"  {count:5d} x {cut}" + (f" in {stored_in}" if stored_in else ""))
    weights = _weights(Path(chosen.model), model)
    source = "its own weights" if weights else "random weights (no safetensors in the folder)"
    world = 2 * chosen.tp
    layouts = {
        "FSDP": TrainingLayout(dims=ParallelDims(dp_shard=world)),
        "FSDP, permuted": TrainingLayout.permuted(ParallelDims(dp_shard=world), chosen.tp),
        "HSDP": TrainingLayout(dims=ParallelDims(dp_replicate=2, dp_shard=chosen.tp)),
    }
    failed = False
    for name, training in layouts.items():
        slices = predict(model, training, ParallelDims(dp_shard=2, tp=chosen.tp))
        wrong = rehearse(slices, weights or (lambda key: _random(key, model.shapes[key])))
        verdict = f"{len(wrong)} slices WRONG: {wrong[:3]}" if wrong else "bit for bit"
        print(f"  {name} over {world} ranks -> 2 replicas of tp={chosen.tp}, {source}: {verdict}")
        failed = failed or bool(wrong)
    return 1 if failed else 0


def _dims(flag: str, given: Sequence[str], axes: Sequence[str]) -> ParallelDims:
    """Degrees from ``axis=n`` words (commas allowed)."""
    degrees: dict[str, int] = {}
    for word in (part for text in given for part in text.split(",") if part):
        axis, separator, degree = word.partition("=")
        if not separator or axis not in axes or not degree.isdecimal() or int(degree) < 1:
            raise ConfigError(f"{flag} {word!r}: write AXIS=N with an axis of {', '.join(axes)}")
        degrees[axis] = int(degree)
    return ParallelDims(**degrees)


def _training_layout(dims: ParallelDims, tp: int, order: str) -> TrainingLayout:
    """The layout asked for; ``auto``: the one in which the actor would train."""
    if order == "permuted" and dims.dp_replicate * dims.dp_shard != dims.world:
        axes = " ".join(f"{axis}={n}" for axis, n in dims.degrees.items() if n > 1 and not axis.startswith("dp_"))
        raise ConfigError(f"--order permuted is for trainers with data parallelism alone, not {axes}")
    if order == "plain":
        return TrainingLayout(dims=dims)
    return TrainingLayout.permuted(dims, tp) if order == "permuted" else TrainingLayout.for_rollout(dims, tp)


def _shown_ranks(world: int) -> list[int]:
    """Ranks whose plans are made and printed."""
    if world <= ALL_RANKS_UP_TO:
        return list(range(world))
    return sorted({0, 1, world // 2 - 1, world // 2, world - 1})


def _print_heading(
    name: str, model: ModelShapes, training: TrainingLayout, generation: ParallelDims, slices: Sequence[Slice]
) -> None:
    """Model and layouts in words."""
    elements = sum(_elements(shape) for shape in model.shapes.values())
    axes = " ".join(f"{axis}={degree}" for axis, degree in training.dims.degrees.items() if degree > 1) or "1 rank"
    order = "permuted shards, row-parallel weights along dim 1" if training.shard_order else "shards in order of rank"
    print(f"{name} ({model.architecture}): {elements / 1e9:.2f} B parameters, {_size(elements * slices[0].itemsize)}")
    print(f"train {axes} ({order}), generate with {generation.dp} replicas of tp={generation.tp}, {slices[0].dtype}")
    print()


def _print_ranks(slices: Sequence[Slice], ranks: Sequence[int], node: int | None) -> tuple[list[RankPlan], float]:
    """One line per rank; the plans, and the seconds of the slowest."""
    columns = f"{'rank':>6} {'holds':>10} {'receives':>10} {'least':>10} {'sends':>10} {'blocks in':>10}"
    print(f"{columns} {'out':>8} {'peers':>6}")
    plans, slowest = [], 0.0
    for rank in ranks:
        started = time.perf_counter()
        plan = plan_rank(slices, rank, ranks_per_node=node)
        slowest = max(slowest, time.perf_counter() - started)
        plans.append(plan)
        sent, received, _ = plan.blocks
        print(
            f"{rank:>6} {_size(plan.held_bytes):>10} {_size(plan.received_bytes):>10} "
            f"{_size(ideal_bytes(slices, rank)):>10} {_size(plan.sent_bytes):>10} {received:>10} {sent:>8} "
            f"{len(plan.peers):>6}"
        )
    return plans, slowest


def _print_totals(
    slices: Sequence[Slice],
    training: TrainingLayout,
    generation: ParallelDims,
    plans: Sequence[RankPlan],
    bucket_bytes: int,
) -> None:
    """Bytes over all ranks, their ratio to the closed form, rounds and buffers."""
    world = generation.world
    received = [bound_bytes(slices, rank) for rank in range(world)]
    full = sum(
        piece.itemsize * _elements([max(box[dim][1] for box in piece.owned if box) for dim in range(len(_some(piece)))])
        for piece in slices
        if piece.slot == 0
    )
    shards = training.shards * training.dims.tp * training.dims.pp
    formula = max(0.0, full * (1 / generation.tp - 1 / shards))
    print()
    print(f"received by a rank: {_size(max(received))} at most, {_size(sum(received) / world)} on average")
    if formula:
        print(
            f"ratio to M (1/t - 1/N) = {_size(formula)}: {sum(received) / world / formula:.4f} on average, "
            f"{max(received) / formula:.4f} at most; gathering everything: {full * (shards - 1) / shards / formula:.2f}"
        )
    else:
        print(f"M (1/t - 1/N) = 0: what is received are replicated slices; gathering everything: {_size(full)}")
    busiest = max(plan.sent_bytes + plan.received_bytes for plan in plans)
    rounds = -(-busiest // bucket_bytes)
    print(f"buckets: 2 x {_size(bucket_bytes)} of extra memory, at least {rounds} rounds of all-to-all")


def _some(piece: Slice) -> Sequence[tuple[int, int]]:
    """Any owned box, for its number of dims."""
    return next(box for box in piece.owned if box is not None)


def _weights(folder: Path, model: ModelShapes) -> Callable[[str], Tensor] | None:
    """The folder's own weights by the trainer's names; None when there are none or they have other names."""
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    files = WeightFiles(str(folder))
    pieces = {name: files.pieces(name, shape) for name, shape in model.shapes.items()}
    missing = sorted(name for name, found in pieces.items() if not found)
    if missing:
        print(f"  the folder's weights have other names ({missing[0]} is not there)")
        return None
    return lambda name: files.assemble(pieces[name], model.shapes[name])


def _random(name: str, shape: Sequence[int]) -> Tensor:
    """Values that differ everywhere, the same for the same name."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(tuple(shape), generator=generator)


def _elements(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    count = 1
    for length in shape:
        count *= length
    return count


def _size(count: float) -> str:
    """Bytes as a short text, decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
