"""Pipeline schedules against each other on rows of skewed lengths: ours at their own lengths, torch's padded.

    torchrun --nproc-per-node 2 benchmarks/pipeline.py MODEL [--rows 24] [--longest 384] [--budget 512] [--repeat 2]

As many stages as processes. Every schedule's engine makes the same update (forward, log-prob, backward, SGD), one of
each in turn, so that only ratios of one run are compared. *even* are rows of one length, where nothing is padded.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from training import NegativeLogProb, make_rows, side_by_side, skewed_lengths

from hybridflow.batch.batch import Batch
from hybridflow.config.choices import PIPELINE_SCHEDULES
from hybridflow.config.model import FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.topology.parallel import ParallelDims


def main() -> None:
    """Prints one line per kind of rows and schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--longest", type=int, default=384)
    parser.add_argument("--budget", type=int, default=512, help="tokens of a micro-batch")
    parser.add_argument("--repeat", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engines = {
        name: FSDPEngine(
            model=ModelConfig(path=given.model),
            head="lm",
            sharding=FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32")),
            dims=ParallelDims(pp=dist.get_world_size()),
            optim=OptimConfig(optimizer="torch.optim.SGD", lr=1e-6),
            pipeline_schedule=name,
        )
        for name in PIPELINE_SCHEDULES
    }
    shapes = engines["1f1b"].parameter_shapes()
    vocabulary = next(shape[0] for name, shape in shapes.items() if "embed" in name)
    lengths = {"skewed": skewed_lengths(given.rows, given.longest)}
    lengths["even"] = [sum(lengths["skewed"]) // given.rows] * given.rows
    for kind, drawn in lengths.items():
        rows = make_rows(drawn, vocabulary)
        for cut in (MicroBatching(max_tokens=given.budget), MicroBatching(max_rows=1)):
            compare(kind, engines, rows, cut, given.repeat)
    dist.destroy_process_group()


def compare(kind: str, engines: dict[str, FSDPEngine], rows: Batch, micro: MicroBatching, repeat: int) -> None:
    """Prints seconds of an update, how often ours fits in, and which share of the computed tokens is padding."""

    def update(engine: FSDPEngine) -> None:
        engine.update(rows, NegativeLogProb(), temperature=1.0, micro=micro, counts=engine.counts(rows))

    steps = [lambda engine=engine: update(engine) for engine in engines.values()]
    best = side_by_side(steps, repeat, "cpu")
    cut = f"{micro.max_tokens} tokens" if micro.max_tokens else "row by row"
    for name, engine, seconds in zip(engines, engines.values(), best, strict=True):
        work = engine.work()
        if dist.get_rank() == 0:
            share = 1 - work.tokens / work.slots
            print(f"| {kind}, {cut} | {name} | {seconds:.2f} s | {seconds / best[0]:.2f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
