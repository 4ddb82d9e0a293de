"""Law: encoding the prompt of a group once changes neither outputs nor loss nor any gradient, at every layout.

The reference is the plain one of training_steps.py, row by row. Groups are uneven: three, one without a shared prompt,
four of which one has no response and one is masked out, three again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from hybridflow.engines.train.base import MicroBatching
from hybridflow.models.packing import prompt_groups
from hybridflow.topology.parallel import ParallelDims
from tests.invariants.training_steps import (
    Case,
    add_value_head,
    assemble,
    build,
    own_rows,
    reference_gradient,
    reference_model,
    reference_outputs,
    rows_of,
    steps,
)
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

PROMPT_OF = (0, 0, 2, 2, 2, 0, 6, 2, 8, 8, 8)
COMMON: dict[str, Any] = {"rows": len(PROMPT_OF), "prompt_of": PROMPT_OF, "engine": {"share_prompts": True}}
ALL, ONE = MicroBatching(max_tokens=10_000), MicroBatching(max_rows=1)
CHECKPOINTED = {"enable_gradient_checkpointing": True}
DP2, TP2, SP2, PP2 = ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(sp=2), ParallelDims(pp=2)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "several groups in one micro-batch": ("qwen2", {"micro": ALL}),
    "groups cut by a token budget": ("llama", {"micro": MicroBatching(max_tokens=14)}),
    "groups cut by rows": ("qwen3", {"micro": MicroBatching(max_rows=3)}),
    "every row alone": ("qwen2", {"micro": ONE}),
    "checkpointed": ("qwen3", {"micro": ALL, "model": CHECKPOINTED}),
    "critic": ("qwen2", {"micro": ALL, "head": "value"}),
    "dp 2": ("qwen2", {"micro": ALL, "dims": DP2}),
    "dp 2, budget, checkpointed": (
        "llama",
        {"micro": MicroBatching(max_tokens=14), "dims": DP2, "model": CHECKPOINTED},
    ),
    "tp 2": ("qwen3", {"micro": ALL, "dims": TP2}),
    "sp 2": ("qwen2", {"micro": ALL, "dims": SP2}),
    "pp 2": ("llama", {"micro": MicroBatching(max_tokens=20), "dims": PP2}),
    "sp 2 x tp 2 critic": ("qwen2", {"micro": ALL, "dims": ParallelDims(sp=2, tp=2), "head": "value"}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for family in ("qwen2", "qwen3", "llama"):
        found[family] = str(save_tiny_model(tmp_path_factory.mktemp(family), family=family))
        add_value_head(found[family])
    return found


def test_the_rows_hold_what_this_law_is_about(folders: dict[str, str]) -> None:
    rows = rows_of(Case(folders["qwen2"], **COMMON))
    groups = prompt_groups(rows)
    sizes = {group: groups.count(group) for group in groups}
    assert sorted(sizes.values()) == [1, 3, 3, 4]
    assert rows["response_length"][3] == 0 and not rows["loss_mask"][2].any(), "both in the group of four"


@pytest.mark.parametrize("name", CASES)
def test_a_step_with_shared_prompts_equals_the_plain_reference(name: str, folders: dict[str, str]) -> None:
    family, options = CASES[name]
    case = Case(folders[family], **{**COMMON, **options})
    loss, gradients = reference_gradient(case)
    world = case.dims.world
    ranks = run_ranks(world, steps, case) if world > 1 else [steps(case)]
    for rank in ranks:
        assert rank["metrics"][0]["loss"] == pytest.approx(loss, abs=1e-6)
    before, after = (assemble([rank[when] for rank in ranks]) for when in ("before", "after"))
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(before[parameter] - after[parameter], gradient, atol=1e-6, rtol=0)


def forward(case: Case) -> dict[str, torch.Tensor]:
    rows = own_rows(rows_of(case), case.dims, dist.get_rank() if dist.is_initialized() else 0)
    needs = frozenset({"log_probs", "entropy"})
    return build(case).forward(rows, needs, temperature=case.temperature, micro=case.micro)


@pytest.mark.parametrize("dims", [ParallelDims(), DP2], ids=["one rank", "dp 2"])
def test_log_probs_and_entropy_equal_the_plain_reference(dims: ParallelDims, folders: dict[str, str]) -> None:
    case = Case(folders["qwen2"], **COMMON, dims=dims, micro=MicroBatching(max_tokens=20))
    with torch.no_grad():
        want = reference_outputs(*reference_model(case.folder, "lm"), rows_of(case), case.temperature)
    ranks = run_ranks(2, forward, case) if dims.world > 1 else [forward(case)]
    for name, column in want.items():
        for rank, got in enumerate(ranks):
            torch.testing.assert_close(got[name], column[rank :: dims.dp], atol=2e-6, rtol=0)


def test_a_group_of_eight_costs_what_its_prompt_and_its_responses_cost(folders: dict[str, str]) -> None:
    """Matrix products of the layers follow the packed tokens: (P + 8 R) against 8 (P + R)."""
    plain = Case(folders["qwen2"], rows=8, prompt_of=(1,) * 8, micro=ALL)
    shared = Case(folders["qwen2"], rows=8, prompt_of=(1,) * 8, micro=ALL, engine={"share_prompts": True})
    rows = rows_of(plain)
    prompt, response = int(rows["prompt_length"][0]), rows["response_length"]
    cost = {}
    for case in (plain, shared):
        engine = build(case)
        with FlopCounterMode(display=False) as counter:
            engine.forward(rows, frozenset({"log_probs"}), temperature=1.0, micro=ALL)
        layers = {name: flops for name, flops in counter.get_flop_counts().items() if name.endswith("layers.0.mlp")}
        cost[case is shared] = sum(next(iter(layers.values())).values())
    own = int((response[response > 0] - 1).sum())
    rows_with = int((response > 0).sum())
    assert cost[True] * (rows_with * prompt + own) == cost[False] * (prompt + own)
