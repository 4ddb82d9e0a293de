"""The law of test_training_gradient.py over the full product of layouts, families, ties, heads, cuts and checkpointing.

864 cases, for the marker ``slow``; a world of ranks runs the eight cases of one layout, family and tie in turn (layouts
with stages also under torch's schedules: ``-k torch``):

    python -m pytest -m slow -v tests/invariants/test_training_product.py
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from hybridflow.config.choices import PIPELINE_SCHEDULES
from hybridflow.engines.train.base import MicroBatching
from hybridflow.topology.parallel import ParallelDims
from tests.invariants.training_steps import Case, add_value_head, assemble, reference_gradient, steps
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one": ParallelDims(),
    "dp 2": ParallelDims(dp_shard=2),
    "dp 4": ParallelDims(dp_shard=4),
    "HSDP 2x2": ParallelDims(dp_replicate=2, dp_shard=2),
    "tp 2": ParallelDims(tp=2),
    "sp 2": ParallelDims(sp=2),
    "pp 2": ParallelDims(pp=2),
    "dp 2 x tp 2": ParallelDims(dp_shard=2, tp=2),
    "dp 2 x sp 2": ParallelDims(dp_shard=2, sp=2),
    "sp 2 x tp 2": ParallelDims(sp=2, tp=2),
    "pp 2 x dp 2": ParallelDims(pp=2, dp_shard=2),
    "pp 2 x dp 2 x tp 2": ParallelDims(pp=2, dp_shard=2, tp=2),
}
WAYS = {
    layout if schedule == "1f1b" else f"{layout} {schedule}": (dims, schedule)
    for (layout, dims), schedule in product(LAYOUTS.items(), PIPELINE_SCHEDULES)
    if dims.pp > 1 or schedule == "1f1b"
}
CUTS = {"packed": MicroBatching(max_tokens=10_000), "accumulated": MicroBatching(max_tokens=24)}


def all_steps(cases: list[Case]) -> list[dict[str, Any]]:
    return [steps(case) for case in cases]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("way", WAYS)
def test_every_combination_equals_the_plain_reference(way: str, family: str, tied: bool, tmp_path) -> None:
    dims, schedule = WAYS[way]
    folder = str(save_tiny_model(tmp_path, family=family, tied=tied))
    add_value_head(folder)
    names = list(product(("lm", "value"), CUTS, (False, True)))
    shared: dict[str, Any] = {"dims": dims, "engine": {"pipeline_schedule": schedule}}
    cases = [
        Case(folder, head=head, micro=CUTS[cut], model={"enable_gradient_checkpointing": again}, **shared)
        for head, cut, again in names
    ]
    references = {head: reference_gradient(Case(folder, head=head)) for head in ("lm", "value")}
    ranks = run_ranks(dims.world, all_steps, cases, deadline_s=280.0)
    for number, (head, cut, again) in enumerate(names):
        loss, gradients = references[head]
        where = f"{head}, {cut}, checkpointed {again}"
        found = [rank[number] for rank in ranks]
        assert all(rank["metrics"][0]["loss"] == pytest.approx(loss, abs=1e-6) for rank in found), where
        before, after = (assemble([rank[when] for rank in found]) for when in ("before", "after"))
        assert set(gradients) <= set(before), where
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                before[name] - after[name], gradient, atol=1e-6, rtol=0, msg=lambda text, at=where: f"{at}: {text}"
            )
