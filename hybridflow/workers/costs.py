"""Metrics of what an engine has computed: MFU, tokens, padding and balance (engines/train/work.py counts them).

perf/mfu/<role>                 FLOPs of the model / seconds / devices / a device's peak: the datasheet's on known
GPUs, elsewhere that of a matrix product measured once
perf/tokens_per_second_per_device/<role>
perf/padding_share/<role>       computed tokens that belong to no row (roundings, ranks without rows), 0 to 1
perf/imbalance/<role>           time of the most loaded rank in every round of micro-batches over the mean, from 1
"""

from __future__ import annotations

from hybridflow.engines.train.base import TrainEngine


def work_metrics(engine: TrainEngine, seconds: float, name: str) -> dict[str, float]:
    """Metrics of all that ``engine`` has computed since the last call, in ``seconds``. Collective."""
    work, devices = engine.work(), engine.dims.world
    return {
        f"perf/mfu/{name}": work.flops / (seconds * devices * engine.peak_flops()),
        f"perf/tokens_per_second_per_device/{name}": work.tokens / (seconds * devices),
        f"perf/padding_share/{name}": 1.0 - work.tokens / work.slots if work.slots else 0.0,
        f"perf/imbalance/{name}": work.imbalance,
    }
