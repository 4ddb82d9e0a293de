"""Loading: equal to transformers' own, ties and buffers kept, errors on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybridflow.models.load import empty_causal_lm, load_causal_lm, read_config
from hybridflow.models.weight_files import WeightFiles, block_of, expert_pieces
from hybridflow.utils.errors import ConfigError, MachineError
from tests.tiny import EXPERTS, save_tiny_model

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_a_loaded_model_equals_the_one_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family=family, tied=tied)
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    got = load_causal_lm(str(tmp_path))
    ids = torch.arange(4, 14)[None]
    assert torch.equal(got(ids).logits, want(ids).logits)
    assert (got.lm_head.weight is got.model.embed_tokens.weight) == tied


def stack_experts(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrites a folder of experts one by one with stacked experts; the stacked parameters."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    stacked = {}
    for name, parameter in empty_causal_lm(str(folder)).named_parameters():
        pieces = expert_pieces(name, parameter.shape)
        if pieces:
            stacked[name] = torch.empty(parameter.shape)
            for piece in pieces:
                block_of(piece, stacked[name]).copy_(stored.pop(piece.stored))
    save_file({**stored, **stacked}, path, metadata={"format": "pt"})
    return stacked


def test_experts_are_read_one_by_one_or_stacked(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family="qwen3_moe")
    one_by_one = load_causal_lm(str(tmp_path)).state_dict()
    assert GATE_UP not in load_file(tmp_path / "model.safetensors")  # what transformers saves has a tensor per expert
    assert len(stack_experts(tmp_path)) == 4
    stacked = load_causal_lm(str(tmp_path)).state_dict()
    assert stacked.keys() == one_by_one.keys()
    assert all(torch.equal(stacked[name], one_by_one[name]) for name in stacked)


def test_gate_and_up_of_an_expert_lie_one_below_the_other() -> None:
    full = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    blocks = {piece.stored: block_of(piece, full) for piece in expert_pieces(GATE_UP, full.shape)}
    prefix = GATE_UP.removesuffix("gate_up_proj")
    assert list(blocks) == [f"{prefix}{e}.{half}_proj.weight" for e in (0, 1) for half in ("gate", "up")]
    assert torch.equal(blocks[f"{prefix}1.gate_proj.weight"], full[1, :3])
    assert torch.equal(blocks[f"{prefix}1.up_proj.weight"], full[1, 3:])


def test_a_missing_or_misshaped_expert_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family="qwen3_moe")
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    expert = stored.pop(name)
    save_file(stored, path)
    with pytest.raises(MachineError, match=rf"no weights for {name} \(7 of 8 parts of {GATE_UP} are there\)"):
        load_causal_lm(str(tmp_path))
    save_file({**stored, name: expert[:3].clone()}, path)
    with pytest.raises(MachineError, match=rf"{name} has shape \(3, 64\), the model needs \(32, 64\)"):
        load_causal_lm(str(tmp_path))


def test_a_whole_parameter_is_put_together_from_its_parts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family="qwen3_moe")
    files, weights = WeightFiles(str(tmp_path)), load_causal_lm(str(tmp_path)).state_dict()
    for name in (GATE_UP, "model.layers.0.mlp.experts.down_proj", "model.norm.weight"):
        pieces = files.pieces(name, weights[name].shape)
        assert len(pieces) == {GATE_UP: 2 * EXPERTS["num_experts"], "model.norm.weight": 1}.get(name, 4)
        assert torch.equal(files.assemble(pieces, weights[name].shape), weights[name])


def test_an_empty_model_has_meta_parameters_and_real_buffers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    model = empty_causal_lm(str(tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_stored_precision_is_converted_to_the_asked_one(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)
    model = load_causal_lm(str(tmp_path), dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_missing_and_misshaped_weights_are_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    norm = stored.pop("model.norm.weight")
    save_file(stored, path)
    with pytest.raises(MachineError, match=r"no weights for model\.norm\.weight"):
        load_causal_lm(str(tmp_path))
    save_file({**stored, "model.norm.weight": norm[:3].clone()}, path)
    with pytest.raises(MachineError, match=r"shape \(3,\), the model needs \(64,\)"):
        load_causal_lm(str(tmp_path))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MachineError, match="no model.safetensors"):
        load_causal_lm(str(tmp_path))


def test_overrides_apply_and_unknown_fields_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    assert read_config(str(tmp_path), override={"rms_norm_eps": 0.5}).rms_norm_eps == 0.5
    with pytest.raises(ConfigError, match="no_such_field"):
        read_config(str(tmp_path), override={"no_such_field": 1})


def test_dropout_is_switched_off(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, attention_dropout=0.5)
    assert read_config(str(tmp_path)).attention_dropout == 0.0


def test_code_that_comes_with_a_model_does_not_run_unless_asked_for(tmp_path: Path) -> None:
    folder, mark = save_tiny_model(tmp_path / "model"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "of_its_own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import Qwen2Config\n"
        f"Path({str(mark)!r}).touch()\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'of_its_own'\n"
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        read_config(str(folder))
    assert not mark.exists()
    assert type(read_config(str(folder), trust_remote_code=True)).__name__ == "OwnConfig" and mark.exists()
