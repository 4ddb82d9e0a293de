"""Layers whose layout is not known are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hybridflow.utils.errors import EngineError
from tests.invariants.training_steps import Case, build

pytestmark = pytest.mark.vllm


def test_a_layer_of_unknown_layout_is_refused_by_parameter_and_module() -> None:
    from hybridflow.engines.rollout.vllm_parameters import engine_parameters

    model = nn.ModuleDict({"gate": nn.Conv1d(2, 2, 1)})
    with pytest.raises(EngineError, match="parameter gate.weight of module Conv1d"):
        engine_parameters(model)


def test_a_layer_without_plain_weights_is_refused() -> None:
    from hybridflow.engines.rollout.vllm_parameters import engine_parameters

    model = nn.Module()
    model.proj = nn.Linear(2, 2, bias=False)
    model.proj.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(EngineError, match="proj.weight .Linear. holds no plain weights"):
        engine_parameters(model)


@pytest.mark.parametrize("rows", [1, 15, 16, 17])
def test_padded_rows_leave_a_linear_layer_what_it_is(rows: int) -> None:
    from hybridflow.engines.rollout.vllm_cpu import padded_linear

    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, 8), (5, 8), (5,)))
    torch.testing.assert_close(padded_linear(x, weight, bias), nn.functional.linear(x, weight, bias))
    assert padded_linear(x.reshape(rows, 1, 8), weight).shape == (rows, 1, 5)


@pytest.mark.parametrize("swap", ["q_proj", "down_proj"])
def test_a_layout_that_vllms_own_loader_does_not_follow_is_named(make_engine, folder, swap: str) -> None:
    from hybridflow.engines.rollout.base import EngineParameters
    from hybridflow.engines.rollout.vllm_parameters import check_loader

    engine = make_engine(folder)
    right = engine.parameters()
    check_loader(engine._model(), right)
    views = {part.hf_name: part.view for part in right.parts}
    leaf = next(name for name in views if swap in name and name.endswith("weight")).partition("layers.0")[2]
    one, other = f"model.layers.0{leaf}", f"model.layers.1{leaf}"
    swapped = {one: views[other], other: views[one]}
    wrong = EngineParameters(
        tuple(replace(part, view=swapped.get(part.hf_name, part.view)) for part in right.parts), right.engine_names
    )
    with pytest.raises(EngineError, match=f"loader puts weights elsewhere: .*holds? {one}.*{other}"):
        check_loader(engine._model(), wrong)


def test_a_packed_copy_that_is_not_of_the_weights_is_named_to_a_hundred_thousandth(engine) -> None:
    """An update of rate 1e-6 changes weights of 0.1 by so little."""
    assert engine.stale_copies() == []
    name = "model.layers.1.mlp.up_proj.weight"
    [part] = [part for part in engine.parameters().parts if part.hf_name == name]
    part.view[5, 7] *= 1 + 1e-5
    [line] = engine.stale_copies()
    assert line.startswith(f"{name} ((0, 128), (0, 128)): the engine's packed copy is not of the weights")
    engine.weights_written(1)
    assert engine.stale_copies() == []


@torch.no_grad()
def test_vllms_own_loader_reads_an_exported_model(make_engine, folder, tmp_path) -> None:
    trainer = build(Case(str(folder)))
    for shard in trainer.shards():
        shard.local.mul_(1.5)
    trainer.save_hf(str(tmp_path / "export"))
    engine = make_engine(tmp_path / "export")
    engine._model().load_weights(load_file(tmp_path / "export" / "model.safetensors").items())
    trained = {shard.name: shard.local for shard in trainer.shards()}
    parts = engine.parameters().parts
    assert {part.hf_name for part in parts} == set(trained)
    assert all(torch.equal(part.view, trained[part.hf_name]) for part in parts)
