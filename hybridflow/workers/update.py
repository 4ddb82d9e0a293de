"""One trainer step of learning, shared by actor and critic: epochs x mini-batches, and the learning-rate schedule.

Beside the loss's own metrics a step reports what it cost (workers/costs.py).
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import torch

from hybridflow.algorithms.contract import Loss
from hybridflow.batch.batch import Batch
from hybridflow.engines.train.base import MicroBatching, TrainEngine
from hybridflow.utils.seeding import derive_seed
from hybridflow.workers.costs import work_metrics
from hybridflow.workers.diagnosis import explain_skip
from hybridflow.workers.minibatch import mini_batches
from hybridflow.workers.pretraining import Pretraining
from hybridflow.workers.skips import Skips


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
    unit: str = "trainer_step"
    """What advances the learning rate: trainer_step (once, at the end) or optimizer_step."""

    def units(self, trainer_steps: int | None, total_rows: int) -> int | None:
        """Length of a run in units of the learning-rate schedule; ``total_rows``: sequences of a trainer step."""
        if trainer_steps is None or self.unit == "trainer_step":
            return trainer_steps
        return trainer_steps * self.epochs * -(-total_rows // self.mini_rows)


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
    pretraining: Pretraining | None = None,
    find_anomaly: bool = False,
    skips: Skips | None = None,
) -> dict[str, float]:
    """Metrics of the step: means over its optimizer steps (maxima for ``*_max``), skipped steps, costs.

    ``<prefix>/lr`` is the rate that the last optimizer step used. A skipped optimizer step advances the schedule too.
    ``pretraining`` joins text to every mini-batch (PPO-ptx). ``find_anomaly`` runs autograd's anomaly detection: the
    operation that gives NaN in a backward pass raises, with the place where it was called. A mini-batch that is skipped
    though it has tokens is looked into (``diagnosis.py``), and counted by ``skips``, which ends the run after too many.
    Collective: every rank of the engine calls it with its rows of the same batch.
    """
    start = time.perf_counter()
    seed = None if schedule.shuffle_seed is None else derive_seed(schedule.shuffle_seed, prefix, "shuffle", step)
    per_update: defaultdict[str, list[float]] = defaultdict(list)
    blocks = mini_batches(
        batch,
        total_rows=total_rows,
        mini_rows=schedule.mini_rows,
        group_size=schedule.group_size,
        epochs=schedule.epochs,
        shuffle_seed=seed,
    )
    for number, rows in enumerate(blocks):
        counts = engine.counts(rows)
        if pretraining is not None:
            rows = pretraining.join(rows, step=step, number=number)
        with torch.autograd.set_detect_anomaly(find_anomaly):
            metrics = engine.update(rows, loss, temperature=temperature, micro=micro, counts=counts)
        if metrics["grad/skipped"] and counts.tokens:
            where = f"{prefix if skips is None else skips.role}, step {step}, mini-batch {number + 1}"
            explain_skip(engine, rows, loss, temperature=temperature, micro=micro, where=where)
        if skips is not None and counts.tokens:
            skips.note(bool(metrics["grad/skipped"]), engine, rows, counts, step=step, number=number + 1)
        for name, value in metrics.items():
            per_update[name].append(value)
        if schedule.unit == "optimizer_step":
            engine.schedule_step()
    seconds = time.perf_counter() - start
    combined = {_named(name, prefix): _combine(name, values) for name, values in per_update.items()}
    if schedule.unit == "trainer_step":
        engine.schedule_step()
    combined[f"{prefix}/optimizer_steps"] = float(max((len(values) for values in per_update.values()), default=0))
    return combined | work_metrics(engine, seconds, prefix)


def _named(name: str, prefix: str) -> str:
    if name.startswith(("actor/", "critic/", "rollout_corr/", "training/")):
        return name
    return f"{prefix}/{name.replace('/', '_')}"


def _combine(name: str, values: list[float]) -> float:
    if name.endswith("max"):
        return max(values)
    if name.endswith("min"):
        return min(values)
    if name.endswith(("skipped", "out_of_memory")):
        return sum(values)
    if name == "lr":
        return values[-1]
    return sum(values) / len(values)
