"""A dataflow of your own: two roles search for the top of a hill, driven from plain Python.

python examples/custom_dataflow/search.py [local | ray] [RANKS]
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist

from hybridflow.batch.batch import Batch
from hybridflow.dispatch.group import RankContext, WorkerGroup, WorkerSpec
from hybridflow.dispatch.register import register
from hybridflow.single_controller.cluster import start_ray, stop_ray
from hybridflow.single_controller.local_group import LocalGroup
from hybridflow.single_controller.ray_group import RayGroup
from hybridflow.single_controller.resource_pool import ResourcePool


class Sampler:
    """Draws points around a mean, and moves the mean to where the scores are high."""

    def __init__(self, context: RankContext) -> None:
        self.mean, self.spread = torch.zeros(2, dtype=torch.float64), 2.0

    @register(dispatch="DP_COMPUTE", reads=("row_id",), writes=("point",))
    def draw(self, rows: Batch, *, step: int) -> Batch:
        """Adds a point per row; its noise depends on step and row alone, not on the rank that draws it."""
        seeds = [torch.Generator().manual_seed(1000 * step + int(row)) for row in rows["row_id"]]
        return Batch({"point": torch.stack([self.mean + self.spread * torch.randn(2, generator=s) for s in seeds])})

    @register(dispatch="DP_COMPUTE", reads=("point", "score"))
    def learn(self, rows: Batch) -> dict[str, float]:
        """The new mean, the same on all ranks: they add up weighted sums. Pad rows have ``valid`` False."""
        weight = (rows["score"] / self.spread**2).exp() * rows["valid"]
        sums = torch.cat([weight @ rows["point"], weight.sum().reshape(1)])
        dist.all_reduce(sums)
        self.mean, self.spread = sums[:2] / sums[2], 0.8 * self.spread
        return {"x": self.mean[0].item(), "y": self.mean[1].item()}


class Judge:
    """Knows the hill."""

    def __init__(self, context: RankContext, *, top: tuple[float, float]) -> None:
        self.top = torch.tensor(top, dtype=torch.float64)

    @register(dispatch="DP_COMPUTE", reads=("point",), writes=("score",))
    def score(self, rows: Batch) -> Batch:
        """Adds the height at each point."""
        return Batch({"score": -(rows["point"] - self.top).square().sum(dim=1)})


def search(samplers: WorkerGroup, judges: WorkerGroup, steps: int) -> dict[str, float]:
    """Where the mean stands after ``steps`` rounds of draw, score, learn."""
    rows, found = Batch({"row_id": torch.arange(31)}), {}
    for step in range(steps):
        points = samplers.call("sampler", "draw", rows, step=step).wait()
        scores = judges.call("judge", "score", points).wait()
        found = samplers.call("sampler", "learn", points.merge(scores)).wait()
    return found


def main(controller: str = "local", ranks: str = "2") -> None:
    """Runs the search on two groups of their own."""
    with ExitStack() as stack:
        if controller == "ray":
            stack.callback(stop_ray, start_ray())
        open_group = (lambda n, specs: RayGroup(ResourcePool([n]), specs)) if controller == "ray" else LocalGroup
        samplers = open_group(int(ranks), [WorkerSpec(role="sampler", target="search:Sampler")])
        stack.callback(samplers.shutdown)
        judges = open_group(1, [WorkerSpec(role="judge", target="search:Judge", kwargs={"top": (3.0, -1.0)})])
        stack.callback(judges.shutdown)
        print("found x={x:.3f} y={y:.3f}".format(**search(samplers, judges, steps=25)))


if __name__ == "__main__":
    main(*sys.argv[1:])
