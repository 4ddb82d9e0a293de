"""LoRA: against PEFT's own model, at several layouts, and the frozen base as reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridflow.algorithms.contract import Counts, Outputs
from hybridflow.engines.train.base import MicroBatching
from hybridflow.models.heads import adapter_name
from hybridflow.models.lora import _full
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError, EngineError, MachineError
from tests.invariants.training_steps import (
    LOSSES,
    Case,
    assemble,
    blocks,
    build,
    make_rows,
    own_rows,
    reference_model,
    reference_outputs,
)
from tests.ranks import RankError, run_ranks
from tests.tiny import save_tiny_model

LM = frozenset({"log_probs"})
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
ADAM = {"optimizer": "AdamW", "lr": 1e-2, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def train(case: Case, out: str) -> dict[str, Any]:
    engine = build(case)
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = own_rows(make_rows(8), case.dims, rank)
    update = dict(temperature=1.0, micro=case.micro)
    start = engine.forward(rows, LM, **update)["log_probs"]
    counts = engine.counts(rows)
    metrics = [engine.update(rows, LOSSES["lm"], counts=counts, **update) for _ in range(2)]
    after = engine.forward(rows, LM, **update)["log_probs"]
    base = engine.forward_without_adapters(rows, LM, **update)["log_probs"]
    again = engine.forward(rows, LM, **update)["log_probs"]
    engine.save(f"{out}/state")
    with pytest.raises(MachineError, match=r"/dev/null/adapters cannot be written \(rank 0: "):  # on every rank
        engine.save_adapters("/dev/null/adapters")
    engine.save_adapters(f"{out}/adapters")
    engine.save_hf(f"{out}/merged")
    other = build(case)
    other.load(f"{out}/state")
    restored = other.forward(rows, LM, **update)["log_probs"]
    return {
        "start": start,
        "after": after,
        "base": base,
        "again": again,
        "restored": restored,
        "metrics": metrics,
        "blocks": blocks(engine),
        "trained": sum(p.numel() for p in engine._parameters.values() if p.requires_grad),
    }


def test_adapters_learn_and_the_base_stays_the_reference(folder: str, tmp_path: Path) -> None:
    got = train(Case(folder, model=LORA, optim=ADAM), str(tmp_path))
    plain = build(Case(folder)).forward(make_rows(8), LM, temperature=1.0, micro=Case(folder).micro)["log_probs"]
    assert torch.equal(got["start"], plain)
    assert torch.equal(got["base"], plain)
    assert torch.equal(got["again"], got["after"])
    assert torch.equal(got["restored"], got["after"])
    assert float((got["after"] - plain).abs().max()) > 1e-3
    assert got["metrics"][0]["loss"] != got["metrics"][1]["loss"]


@pytest.mark.parametrize("rslora", [False, True])
def test_saved_adapters_and_merged_weights_agree_with_peft(folder: str, rslora: bool, tmp_path: Path) -> None:
    got = train(Case(folder, model={**LORA, "use_rslora": rslora}, optim=ADAM), str(tmp_path))
    ids = torch.arange(4, 20)[None]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapters"))(ids).logits
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    stored = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).named_parameters())
    for name, value in assemble([got["blocks"]]).items():
        assert torch.equal(value, stored[name])


@pytest.mark.parametrize(
    ("dims", "more"),
    [
        (ParallelDims(dp_shard=2), {}),
        (ParallelDims(sp=2), {}),
        (ParallelDims(pp=2), {}),
        (ParallelDims(tp=2), {}),
        (ParallelDims(dp_shard=2, tp=2), {"use_rslora": True}),
    ],
    ids=["dp 2", "sp 2", "pp 2", "tp 2", "dp 2 x tp 2, rsLoRA"],
)
def test_layouts_agree(folder: str, dims: ParallelDims, more: dict[str, Any], tmp_path: Path) -> None:
    options = {"model": {**LORA, **more}, "optim": ADAM}
    one = train(Case(folder, **options), str(tmp_path / "one"))
    ranks = run_ranks(dims.world, train, Case(folder, **options, dims=dims), str(tmp_path / "two"))
    for rank in ranks:
        assert torch.equal(rank["restored"], rank["after"]) and torch.equal(rank["base"], rank["start"])
    whole = assemble([rank["blocks"] for rank in ranks])
    stored = load_file(tmp_path / "two" / "merged" / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in whole.items()), "what is published is what is saved"
    written = load_file(tmp_path / "two" / "adapters" / "adapter_model.safetensors")
    for name, value in load_file(tmp_path / "one" / "adapters" / "adapter_model.safetensors").items():
        torch.testing.assert_close(written[name], value, atol=2e-3, rtol=0)
    assert ranks[0]["metrics"][1]["loss"] == pytest.approx(one["metrics"][1]["loss"], abs=1e-5)
    want, got = assemble([one["blocks"]]), assemble([rank["blocks"] for rank in ranks])
    for name in want:
        # Adam turns rounding of gradients near 0 into steps of up to lr; a low-rank product damps them.
        torch.testing.assert_close(got[name], want[name], atol=1e-3, rtol=0)


def random_adapters(folder: str, out: Path, *, rslora: bool) -> None:
    """An adapter folder in which neither half is zero: a zero B would hide the gradient of A."""
    engine = build(Case(folder, model={**LORA, "use_rslora": rslora}))
    g = torch.Generator().manual_seed(5)
    for name, parameter in engine._parameters.items():
        if adapter_name(name):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=g))
    engine.save_adapters(str(out))


def step(case: Case) -> dict[str, Any]:
    """One step of SGD with rate 1: what adapters lost, whole, is their gradient; and which weights want one."""
    engine = build(case)
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = own_rows(make_rows(8), case.dims, rank)
    before = {name: _full(held).clone() for name, held in engine._parameters.items()}
    update = dict(temperature=case.temperature, micro=case.micro, counts=engine.counts(rows))
    metrics = engine.update(rows, LOSSES[case.head], **update)
    moved = {name: before[name] - _full(held) for name, held in engine._parameters.items()}
    return {"loss": metrics["loss"], "norm": metrics["grad/norm"], "moved": moved}


@pytest.mark.parametrize(
    ("family", "rslora", "options"),
    [
        ("qwen2", True, {"dims": ParallelDims()}),
        ("qwen2", False, {"dims": ParallelDims(tp=2)}),
        ("qwen3", True, {"dims": ParallelDims(tp=2), "micro": MicroBatching(max_rows=2)}),
        ("llama", False, {"dims": ParallelDims(dp_shard=2, tp=2)}),
        ("qwen2", True, {"dims": ParallelDims(sp=2, tp=2)}),
    ],
    ids=["one process, rsLoRA", "tp 2", "tp 2, rsLoRA, row by row", "dp 2 x tp 2", "sp 2 x tp 2, rsLoRA"],
)
def test_a_step_equals_peft_in_one_process(family: str, rslora: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """Law: every adapter's gradient is that of PEFT's own model, row by row, to 1e-6; all other weights stand still."""
    folder = str(save_tiny_model(tmp_path / "model", family=family))
    random_adapters(folder, tmp_path / "adapters", rslora=rslora)
    case = Case(
        folder, model={**LORA, "use_rslora": rslora, "lora_adapter_path": str(tmp_path / "adapters")}, **options
    )
    model, _ = reference_model(folder, "lm")
    wrapped = PeftModel.from_pretrained(model, str(tmp_path / "adapters"), is_trainable=True)
    rows = make_rows(8)
    mask = rows["loss_mask"]
    counts = Counts(tokens=int(mask.sum()), sequences=int(mask.any(-1).sum()), rows=len(rows))
    loss, _ = LOSSES["lm"](Outputs(**reference_outputs(model, None, rows, case.temperature)), rows, counts)
    loss.backward()
    wanted = {
        name.removeprefix("base_model.model.").replace(".default.", "."): p.grad
        for name, p in wrapped.named_parameters()
        if p.grad is not None
    }
    assert len(wanted) == 2 * 7 * 2 and all(float(grad.abs().max()) > 1e-4 for grad in wanted.values())
    ranks = run_ranks(case.dims.world, step, case) if case.dims.world > 1 else [step(case)]
    for rank in ranks:
        assert rank["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
        for name, moved in rank["moved"].items():
            expected = wanted.get(name)
            if expected is None:
                assert not moved.any(), f"{name} is frozen and moved"
            else:
                torch.testing.assert_close(moved, expected, atol=1e-6, rtol=0)


def test_only_adapters_are_trained(folder: str, tmp_path: Path) -> None:
    got = train(Case(folder, model=LORA, optim=ADAM), str(tmp_path))
    # Two layers; inputs and outputs of q 64-64, k and v 64-32, o 64-64, gate and up 64-128, down 128-64.
    pairs = (64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128)
    assert got["trained"] == 2 * 4 * pairs


def test_training_continues_from_an_adapter_folder(folder: str, tmp_path: Path) -> None:
    got = train(Case(folder, model=LORA, optim=ADAM), str(tmp_path))
    engine = build(Case(folder, model={**LORA, "lora_adapter_path": str(tmp_path / "adapters")}))
    found = engine.forward(make_rows(8), LM, temperature=1.0, micro=Case(folder).micro)["log_probs"]
    assert torch.equal(found, got["after"])


def test_a_target_that_matches_nothing_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="target_modules"):
        build(Case(folder, model={**LORA, "target_modules": ("no_such_proj",)}))


def test_an_engine_without_adapters_has_no_reference(folder: str) -> None:
    with pytest.raises(EngineError, match="no reference policy"):
        build(Case(folder)).forward_without_adapters(make_rows(2), LM, temperature=1.0, micro=Case(folder).micro)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_outside_the_layers_are_refused_by_name(tmp_path: Path, target: str) -> None:
    untied = str(save_tiny_model(tmp_path, tied=False))
    with pytest.raises(ConfigError, match=rf"puts adapters on [a-z.]*{target}: only linear layers inside"):
        build(Case(untied, model={**LORA, "target_modules": ["q_proj", target]}))


def test_a_stage_that_would_train_nothing_is_refused_with_the_keys(folder: str) -> None:
    case = Case(folder, dims=ParallelDims(pp=2), model={**LORA, "target_modules": r".*layers\.1\..*q_proj"})
    with pytest.raises(RankError, match="every pipeline stage needs a layer that model.target_modules"):
        run_ranks(2, start, case)


def start(case: Case) -> None:
    build(case)
