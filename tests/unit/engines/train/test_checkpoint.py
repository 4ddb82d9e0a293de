"""Checkpoints: resume bit for bit, at another layout too, and export that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import MachineError
from tests.invariants.training_steps import LOSSES, Case, add_value_head, assemble, blocks, build, make_rows, own_rows
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model
from tests.unit.models.test_load import stack_experts

ADAM = {"optimizer": "AdamW", "lr": 1e-2, "lr_scheduler_type": "linear", "lr_warmup_steps": 1}
LONG = {"total_steps": 10}
DP1, DP2 = ParallelDims(), ParallelDims(dp_shard=2)
PP2_TP2 = ParallelDims(pp=2, tp=2)
PERMUTED = {"shard_order": [0, 2, 1, 3], "row_parallel_shard_dim1": True, **LONG}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(save_tiny_model(tmp_path_factory.mktemp("model")))
    add_value_head(path)
    return path


def train(case: Case, load: str | None, count: int, save: str | None, export: str | None = None) -> dict[str, Any]:
    """Loads, makes ``count`` steps on rows that depend on the step, saves."""
    engine = build(case)
    rank = dist.get_rank() if dist.is_initialized() else 0
    start = 0
    if load is not None:
        engine.load(load)
        start = int(Path(load).name)
    metrics = []
    for step in range(start, start + count):
        rows = own_rows(make_rows(case.rows, seed=step), case.dims, rank)
        counts = engine.counts(rows)
        metrics.append(engine.update(rows, LOSSES[case.head], temperature=1.0, micro=case.micro, counts=counts))
        engine.schedule_step()
    if save is not None:
        engine.save(save)
    if export is not None:
        engine.save_hf(export)
    return {"metrics": metrics, "blocks": blocks(engine), "random": torch.rand(3)}


def run(case: Case, *args: Any) -> list[dict[str, Any]]:
    return run_ranks(case.dims.world, train, case, *args)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("world", [1, 2])
def test_resuming_equals_going_straight_on_bit_for_bit(folder: str, head: str, world: int, tmp_path: Path) -> None:
    case = Case(folder, head=head, dims=ParallelDims(dp_shard=world), optim=ADAM, engine=LONG)
    straight = run(case, None, 4, None)
    run(case, None, 2, str(tmp_path / "2"))
    resumed = run(case, str(tmp_path / "2"), 2, None)
    for one, two in zip(straight, resumed, strict=True):
        assert one["metrics"][2:] == two["metrics"]
        assert all(torch.equal(one["blocks"][name][2], two["blocks"][name][2]) for name in one["blocks"])
        assert torch.equal(one["random"], two["random"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Case("", dims=DP1), Case("", dims=DP2)),
        (Case("", dims=DP2), Case("", dims=DP1)),
        (Case("", dims=DP2), Case("", dims=ParallelDims(dp_shard=4), engine=PERMUTED)),
        (Case("", dims=ParallelDims(dp_shard=4), engine=PERMUTED), Case("", dims=DP1)),
        (Case("", dims=PP2_TP2), Case("", dims=DP2)),
        (Case("", dims=DP1), Case("", dims=PP2_TP2)),
        (Case("", dims=ParallelDims(dp_shard=2, tp=2)), Case("", dims=ParallelDims(dp_replicate=2, dp_shard=2))),
    ],
    ids=[
        "1 to 2",
        "2 to 1",
        "2 to 4 permuted",
        "4 permuted to 1",
        "pp 2 x tp 2 to dp 2",
        "1 to pp 2 x tp 2",
        "dp 2 x tp 2 to HSDP",
    ],
)
def test_a_checkpoint_continues_at_another_layout(folder: str, before: Case, after: Case, tmp_path: Path) -> None:
    def complete(case: Case) -> Case:
        return Case(folder, dims=case.dims, optim=ADAM, engine={**LONG, **case.engine})

    straight = run(complete(Case("", dims=DP1)), None, 4, None)
    run(complete(before), None, 2, str(tmp_path / "2"))
    resumed = run(complete(after), str(tmp_path / "2"), 2, None)
    for step in (0, 1):
        want, got = straight[0]["metrics"][2 + step], resumed[0]["metrics"][step]
        assert got["lr"] == want["lr"]
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-4)
        assert got["grad/norm"] == pytest.approx(want["grad/norm"], rel=1e-3)


@pytest.mark.parametrize("dims", [DP1, DP2, PP2_TP2], ids=["1", "dp 2", "pp 2 x tp 2"])
def test_an_exported_model_loads_in_transformers(folder: str, dims: ParallelDims, tmp_path: Path) -> None:
    case = Case(folder, dims=dims, optim=ADAM, engine=LONG)
    ranks = run(case, None, 1, None, str(tmp_path / "hf"))
    full = assemble([rank["blocks"] for rank in ranks])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, full[name]), name
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert build(Case(str(tmp_path / "hf"))).parameter_shapes().keys() == full.keys()


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_exported_experts_have_the_form_of_the_folder_they_came_from(stacked: bool, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family="qwen3_moe")
    if stacked:
        stack_experts(folder)
    case = Case(str(folder), dims=DP2, optim=ADAM, engine=LONG)
    ranks = run(case, None, 2, None, str(tmp_path / "hf"))  # the first step warms up: its rate is 0
    full = assemble([rank["blocks"] for rank in ranks])
    exported, source = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", folder))
    assert {name: value.shape for name, value in exported.items()} == {n: v.shape for n, v in source.items()}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, full[name]), name
        assert not torch.equal(parameter, before[name]), name


def test_an_exported_critic_is_a_token_classifier_of_transformers(folder: str, tmp_path: Path) -> None:
    case = Case(folder, head="value", optim=ADAM, engine=LONG)
    full = assemble([run(case, None, 1, None, str(tmp_path / "hf"))[0]["blocks"]])
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert torch.equal(model.score.weight, full["score.weight"])
    assert torch.equal(model.score.bias, full["score.bias"])


def test_a_folder_without_checkpoint_is_named(folder: str, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="holds no training checkpoint"):
        build(Case(folder)).load(str(tmp_path))
