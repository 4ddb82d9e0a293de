"""Law: loss and gradient of one optimizer step do not depend on ranks, micro-batches, packing or checkpointing.

Each case is compared with a plain single-process reference (training_steps.py). Tolerance 1e-6 absolute: float32 sums
of about 1e4 products of size 0.1 in another order differ by a few 1e-7.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.engines.train.base import MicroBatching
from hybridflow.topology.parallel import ParallelDims
from tests.invariants.training_steps import Case, add_value_head, assemble, reference_gradient, steps
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

ONE_BY_ONE = MicroBatching(max_rows=1)
ALL = MicroBatching(max_tokens=10_000)
DP1, DP2, DP4 = ParallelDims(), ParallelDims(dp_shard=2), ParallelDims(dp_shard=4)
HSDP = ParallelDims(dp_replicate=2, dp_shard=2)
DDP = ParallelDims(dp_replicate=2)
SP2, SP4, DP2_SP2 = ParallelDims(sp=2), ParallelDims(sp=4), ParallelDims(dp_shard=2, sp=2)
TP2, DP2_TP2, SP2_TP2 = ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2), ParallelDims(sp=2, tp=2)
PP2, PP2_DP2 = ParallelDims(pp=2), ParallelDims(pp=2, dp_shard=2)
PP2_TP2, PP2_SP2 = ParallelDims(pp=2, tp=2), ParallelDims(pp=2, sp=2)
CHECKPOINTED = {"enable_gradient_checkpointing": True}
SELECTIVE = {**CHECKPOINTED, "gradient_checkpointing_mode": "selective"}
TORCH_1F1B, GPIPE = {"pipeline_schedule": "torch_1f1b"}, {"pipeline_schedule": "torch_gpipe"}

CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "qwen2 tied, one process, one micro-batch": ("qwen2", True, {"micro": ALL}),
    "qwen3 untied, one process, row by row": ("qwen3", False, {"micro": ONE_BY_ONE}),
    "llama tied, one process, checkpointed": ("llama", True, {"model": CHECKPOINTED}),
    "llama untied critic, one process": ("llama", False, {"head": "value"}),
    "qwen3 tied, one process, selectively checkpointed": ("qwen3", True, {"model": SELECTIVE}),
    "qwen3 experts untied, dp 2, selectively checkpointed": ("qwen3_moe", False, {"dims": DP2, "model": SELECTIVE}),
    "llama tied, dp 2 x tp 2, selectively checkpointed": ("llama", True, {"dims": DP2_TP2, "model": SELECTIVE}),
    "qwen3 untied critic, sp 2, selectively checkpointed": (
        "qwen3",
        False,
        {"dims": SP2, "head": "value", "model": SELECTIVE},
    ),
    "qwen2 tied, pp 2, torch's 1F1B, selectively checkpointed": (
        "qwen2",
        True,
        {"dims": PP2, "model": SELECTIVE, "engine": TORCH_1F1B},
    ),
    "qwen2 tied, dp 2": ("qwen2", True, {"dims": DP2}),
    "qwen3 tied, dp 2, one micro-batch": ("qwen3", True, {"dims": DP2, "micro": ALL}),
    "llama untied, dp 2, checkpointed": ("llama", False, {"dims": DP2, "model": CHECKPOINTED}),
    "qwen2 tied critic, dp 2, row by row": ("qwen2", True, {"dims": DP2, "head": "value", "micro": ONE_BY_ONE}),
    "qwen2 untied, dp 2, ZeRO-2": ("qwen2", False, {"dims": DP2, "sharding": {"reshard_after_forward": False}}),
    "llama tied, replicas 2": ("llama", True, {"dims": DDP}),
    "qwen2 untied, dp 4, a rank without tokens": ("qwen2", False, {"dims": DP4, "rows": 4}),
    "qwen3 untied critic, dp 4, checkpointed": ("qwen3", False, {"dims": DP4, "head": "value", "model": CHECKPOINTED}),
    "qwen2 tied, HSDP 2x2": ("qwen2", True, {"dims": HSDP}),
    "llama untied, HSDP 2x2, permuted, dim 1": (
        "llama",
        False,
        {"dims": HSDP, "engine": {"shard_order": [0, 2, 1, 3], "row_parallel_shard_dim1": True}},
    ),
    "qwen2 tied, dp 4, permuted, dim 1": (
        "qwen2",
        True,
        {"dims": DP4, "engine": {"shard_order": [0, 2, 1, 3], "row_parallel_shard_dim1": True}},
    ),
    "qwen2 tied, sp 2": ("qwen2", True, {"dims": SP2}),
    "llama untied critic, sp 2, checkpointed, row by row": (
        "llama",
        False,
        {"dims": SP2, "head": "value", "model": CHECKPOINTED, "micro": ONE_BY_ONE},
    ),
    "qwen3 untied, sp 4 with 2 kv heads": ("qwen3", False, {"dims": SP4}),
    "llama tied, dp 2 x sp 2, a rank without tokens": ("llama", True, {"dims": DP2_SP2, "rows": 4}),
    "qwen2 tied, tp 2": ("qwen2", True, {"dims": TP2}),
    "qwen3 untied, tp 2, checkpointed": ("qwen3", False, {"dims": TP2, "model": CHECKPOINTED}),
    "llama tied critic, tp 2, row by row": ("llama", True, {"dims": TP2, "head": "value", "micro": ONE_BY_ONE}),
    "qwen3 tied, dp 2 x tp 2": ("qwen3", True, {"dims": DP2_TP2}),
    "llama untied, dp 2 x tp 2, checkpointed": ("llama", False, {"dims": DP2_TP2, "model": CHECKPOINTED}),
    "qwen2 untied critic, dp 2 x tp 2, a rank without tokens": (
        "qwen2",
        False,
        {"dims": DP2_TP2, "head": "value", "rows": 4},
    ),
    "qwen3 experts untied, one process, one micro-batch": ("qwen3_moe", False, {"micro": ALL}),
    "qwen3 experts untied, HSDP 2x2, permuted, dim 1, checkpointed": (
        "qwen3_moe",
        False,
        {
            "dims": HSDP,
            "model": CHECKPOINTED,
            "engine": {"shard_order": [0, 2, 1, 3], "row_parallel_shard_dim1": True},
        },
    ),
    "qwen3 experts tied critic, dp 4, a rank without tokens": (
        "qwen3_moe",
        True,
        {"dims": DP4, "head": "value", "rows": 4},
    ),
    "qwen2 tied, pp 2": ("qwen2", True, {"dims": PP2}),
    "llama untied critic, pp 2, checkpointed, row by row": (
        "llama",
        False,
        {"dims": PP2, "head": "value", "model": CHECKPOINTED, "micro": ONE_BY_ONE},
    ),
    "qwen3 tied, pp 2 x dp 2, a rank without tokens": ("qwen3", True, {"dims": PP2_DP2, "rows": 4}),
    "llama tied, pp 2 x tp 2, row by row": ("llama", True, {"dims": PP2_TP2, "micro": ONE_BY_ONE}),
    "qwen2 untied, pp 2 x sp 2, one micro-batch": ("qwen2", False, {"dims": PP2_SP2, "micro": ALL}),
    "qwen3 tied, pp 2 x dp 2 x tp 2": ("qwen3", True, {"dims": ParallelDims(pp=2, dp_shard=2, tp=2)}),
    "qwen2 tied, sp 2 x tp 2": ("qwen2", True, {"dims": SP2_TP2}),
    "qwen2 tied, pp 2, torch's 1F1B": ("qwen2", True, {"dims": PP2, "engine": TORCH_1F1B}),
    "llama untied critic, pp 2, torch's GPipe, checkpointed, row by row": (
        "llama",
        False,
        {"dims": PP2, "head": "value", "model": CHECKPOINTED, "micro": ONE_BY_ONE, "engine": GPIPE},
    ),
    "qwen3 tied, pp 2 x dp 2, torch's GPipe, a rank without tokens": (
        "qwen3",
        True,
        {"dims": PP2_DP2, "rows": 4, "engine": GPIPE},
    ),
    "qwen2 untied, pp 2 x sp 2, torch's 1F1B, fewer micro-batches than stages asked for": (
        "qwen2",
        False,
        {"dims": PP2_SP2, "micro": ALL, "engine": TORCH_1F1B},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], str]:
    root = tmp_path_factory.mktemp("models")
    names = {(family, tied) for family, tied, _ in CASES.values()}
    found = {}
    for family, tied in sorted(names):
        found[family, tied] = str(save_tiny_model(root / f"{family}_{tied}", family=family, tied=tied))
        add_value_head(found[family, tied])
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_plain_reference(name: str, folders: dict[tuple[str, bool], Path]) -> None:
    family, tied, options = CASES[name]
    case = Case(folder=str(folders[family, tied]), **options)
    loss, gradients = reference_gradient(case)
    world = case.dims.world
    ranks = run_ranks(world, steps, case) if world > 1 else [steps(case)]
    for rank in ranks:
        assert rank["metrics"][0]["loss"] == pytest.approx(loss, abs=1e-6)
        assert rank["metrics"] == ranks[0]["metrics"], "metrics must be equal on all ranks"
    before = assemble([rank["before"] for rank in ranks])
    after = assemble([rank["after"] for rank in ranks])
    still = [name for name in gradients if float(gradients[name].abs().max()) < 1e-5 and "k_proj.bias" not in name]
    assert not still, f"a reference without gradient proves nothing: {still}"
    assert set(gradients) <= set(before)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(before[parameter] - after[parameter], gradient, atol=1e-6, rtol=0)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert ranks[0]["metrics"][0]["grad/norm"] == pytest.approx(float(norm), rel=1e-5)
