"""Compiled layers: the same numbers, and no compilation per micro-batch.

The engine compiles on GPUs only; here the graphs are taken (that is what can go wrong with packed rows) and run as they
are.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter
from transformers import AttentionInterface

from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.parallelize import compile_blocks
from hybridflow.models.attention import NAME, packed_attention
from hybridflow.utils.errors import ConfigError
from tests.invariants.training_steps import LOSSES, Case, build, make_rows
from tests.tiny import save_tiny_model


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    AttentionInterface.register(NAME, packed_attention)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_compiled_layers_give_the_same_numbers_without_a_graph_per_length(tmp_path, family: str) -> None:
    folder = str(save_tiny_model(tmp_path, family=family))
    plain, compiled = build(Case(folder)), build(Case(folder))
    counter = CompileCounter()
    compile_blocks(compiled._model, backend=counter)
    micro = MicroBatching(max_rows=3)
    graphs = []
    for seed in range(1, 5):
        rows = make_rows(9, seed=seed)
        update = dict(temperature=1.0, micro=micro, counts=plain.counts(rows))
        want = plain.update(rows, LOSSES["lm"], **update)
        got = compiled.update(rows, LOSSES["lm"], **update)
        assert got == pytest.approx(want, abs=1e-5)
        graphs.append(counter.frame_count)
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[-1] == graphs[0], f"lengths of micro-batches cause compilations: {graphs}"


def test_compilation_on_a_cpu_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="works on GPUs"):
        build(Case(str(save_tiny_model(tmp_path)), engine={"compile_layers": True}))
