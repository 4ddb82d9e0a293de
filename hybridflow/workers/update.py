"""One trainer step of learning, shared by actor and critic: epochs x mini-batches, then one tick of the schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hybridflow.algorithms.contract import Loss
from hybridflow.batch.batch import Batch
from hybridflow.engines.train.base import MicroBatching, TrainEngine
from hybridflow.utils.seeding import derive_seed
from hybridflow.workers.minibatch import mini_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the rows of a step become optimizer steps."""

    mini_rows: int
    """Sequences of a mini-batch over all ranks."""
    group_size: int
    """Samples per prompt."""
    epochs: int
    """Passes over the batch."""
    shuffle_seed: int | None
    """None keeps the order of rows."""


def update_epochs(
    engine: TrainEngine,
    batch: Batch,
    loss: Loss,
    *,
    schedule: Schedule,
    temperature: float,
    micro: MicroBatching,
    total_rows: int,
    step: int,
    prefix: str,
) -> dict[str, float]:
    """Metrics of the step: means over its optimizer steps (maxima for ``*_max``), learning rate, skipped steps.

    Collective: every rank of the engine calls it with its rows of the same batch.
    """
    seed = None if schedule.shuffle_seed is None else derive_seed(schedule.shuffle_seed, prefix, "shuffle", step)
    per_update: defaultdict[str, list[float]] = defaultdict(list)
    for rows in mini_batches(
        batch,
        total_rows=total_rows,
        mini_rows=schedule.mini_rows,
        group_size=schedule.group_size,
        epochs=schedule.epochs,
        shuffle_seed=seed,
    ):
        metrics = engine.update(rows, loss, temperature=temperature, micro=micro, counts=engine.counts(rows))
        for name, value in metrics.items():
            per_update[name].append(value)
    combined = {_named(name, prefix): _combine(name, values) for name, values in per_update.items()}
    combined[f"{prefix}/lr"] = engine.schedule_step()
    combined[f"{prefix}/optimizer_steps"] = float(max((len(values) for values in per_update.values()), default=0))
    return combined


def _named(name: str, prefix: str) -> str:
    return name if name.startswith(("actor/", "critic/")) else f"{prefix}/{name.replace('/', '_')}"


def _combine(name: str, values: list[float]) -> float:
    if name.endswith("max"):
        return max(values)
    if name.endswith("min"):
        return min(values)
    if name.endswith("skipped"):
        return sum(values)
    return sum(values) / len(values)
