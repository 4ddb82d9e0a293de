"""Activation checkpointing: which operations run again, and what is kept for them. (Results: tests/invariants.)"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaModel

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.parallelize import refuse_unsupported
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError
from hybridflow.workers.profiler import allocations
from tests.invariants.training_steps import LOSSES, Case, build, rows_of
from tests.tiny import save_tiny_model

FULL = {"enable_gradient_checkpointing": True}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": FULL,
    "selective": {**FULL, "gradient_checkpointing_mode": "selective"},
}
LAYERS = 2


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Counter[str], int]]:
    """Operations of an update of one micro-batch, and the peak of what it allocates."""
    folder = str(save_tiny_model(tmp_path_factory.mktemp("model"), family="llama", num_hidden_layers=LAYERS))
    found = {}
    for mode, model in MODES.items():
        case = Case(folder, model=model, micro=MicroBatching(max_tokens=10_000), rows=64)
        engine, rows = build(case), rows_of(case)
        settings = {"temperature": 1.0, "micro": case.micro, "counts": engine.counts(rows)}
        with Operations() as seen:
            engine.update(rows, LOSSES["lm"], **settings)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
            engine.update(rows, LOSSES["lm"], **settings)
        peak, _, _ = allocations(session.profiler.kineto_results.experimental_event_tree())
        found[mode] = seen.calls, peak
    return found


def test_full_runs_products_and_norms_of_layers_again(updates) -> None:
    none, full = updates["none"][0], updates["full"][0]
    # The last product of a layer is not needed again: its gradient is made of its factors.
    assert full["mm"] - none["mm"] == 6 * LAYERS
    assert full["rsqrt"] - none["rsqrt"] == 2 * LAYERS


def test_selective_runs_norms_again_and_neither_products_nor_attention(updates) -> None:
    none, chosen = updates["none"][0], updates["selective"][0]
    assert chosen["mm"] == none["mm"]
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert chosen[attention] == none[attention] > 0
    assert chosen["rsqrt"] - none["rsqrt"] == 2 * LAYERS


def test_selective_holds_less_than_all_and_more_than_inputs(updates) -> None:
    assert updates["full"][1] < 0.95 * updates["selective"][1] < 0.9 * updates["none"][1]


def test_selective_is_refused_where_layers_are_compiled() -> None:
    model = ModelConfig(**MODES["selective"])
    with pytest.raises(ConfigError, match="use full, or use_torch_compile=False"):
        refuse_unsupported(ParallelDims(), model, FSDPConfig(), device="cuda:0", compiles=True)


def test_an_architecture_that_cannot_be_checkpointed_is_named(tmp_path: Path, monkeypatch) -> None:
    folder = str(save_tiny_model(tmp_path, family="llama"))
    monkeypatch.setattr(LlamaModel, "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="transformers cannot checkpoint LlamaModel"):
        build(Case(folder, model=FULL))
