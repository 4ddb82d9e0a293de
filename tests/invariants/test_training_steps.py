"""Laws of several optimizer steps: weights agree at every layout, and gradients are reduced once a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.engines.train.base import MicroBatching
from hybridflow.topology.parallel import ParallelDims
from tests.invariants.training_steps import LOSSES, Case, add_value_head, assemble, build, make_rows, own_rows, steps
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

ADAM = {"optimizer": "AdamW", "lr": 1e-2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    found = {}
    for tied in (True, False):
        found[tied] = str(save_tiny_model(tmp_path_factory.mktemp("model"), tied=tied))
        add_value_head(found[tied])
    return found


@pytest.mark.parametrize(
    ("dims", "tied", "head"),
    [
        (ParallelDims(dp_shard=2), True, "lm"),
        (ParallelDims(tp=2), True, "lm"),
        (ParallelDims(tp=2), False, "value"),
        (ParallelDims(pp=2), True, "lm"),
        (ParallelDims(pp=2), False, "value"),
        (ParallelDims(sp=2), False, "lm"),
        (ParallelDims(sp=2), True, "value"),
        (ParallelDims(pp=2, dp_shard=2, tp=2), True, "lm"),
    ],
    ids=lambda part: str({axis: n for axis, n in part.degrees.items() if n > 1}) if hasattr(part, "degrees") else None,
)
def test_three_adamw_steps_agree(dims: ParallelDims, tied: bool, head: str, folders: dict[bool, str]) -> None:
    options: dict[str, Any] = {"head": head, "optim": ADAM, "steps": 3, "engine": {"grad_clip": 1.0}}
    one = steps(Case(folders[tied], **options))
    ranks = run_ranks(dims.world, steps, Case(folders[tied], dims=dims, **options))
    want, got = assemble([one["after"]]), assemble([rank["after"] for rank in ranks])
    assert want.keys() == got.keys()
    for name in want:
        # Adam divides by the root of tiny second moments: rounding of a gradient near 0 can turn its sign.
        torch.testing.assert_close(got[name], want[name], atol=2e-3, rtol=0)
        assert float((got[name] - want[name]).abs().mean()) < 1e-5, name
    assert ranks[0]["metrics"][2]["loss"] == pytest.approx(one["metrics"][2]["loss"], abs=1e-5)


class ReduceScatters(TorchDispatchMode):
    """Counts reduce-scatter collectives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def reductions(case: Case, micro_batches: int) -> tuple[int, int]:
    """Collectives that reduce gradients in one update of ``micro_batches`` micro-batches, and units of sharding."""
    engine = build(case)
    rank = dist.get_rank()
    rows = own_rows(make_rows(8, seed=3), case.dims, rank)
    micro = MicroBatching(max_rows=-(-len(rows) // micro_batches))
    counts = engine.counts(rows)
    with ReduceScatters() as counter:
        engine.update(rows, LOSSES["lm"], temperature=1.0, micro=micro, counts=counts)
    return counter.count, len(engine._model.net.base_model.layers) + 1


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_gradients_are_reduced_once_per_optimizer_step(micro_batches: int, folders: dict[bool, str]) -> None:
    """One reduce-scatter for every unit of sharding, however many micro-batches there are."""
    for count, units in run_ranks(2, reductions, Case(folders[True], dims=ParallelDims(dp_shard=2)), micro_batches):
        assert count == units == 3
