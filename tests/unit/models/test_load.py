"""Loading: equal to transformers' own, ties and buffers kept, errors on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybridflow.models.load import empty_causal_lm, load_causal_lm, read_config
from hybridflow.utils.errors import ConfigError, MachineError
from tests.tiny import save_tiny_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_loaded_model_equals_the_one_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family=family, tied=tied)
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    got = load_causal_lm(str(tmp_path))
    ids = torch.arange(4, 14)[None]
    assert torch.equal(got(ids).logits, want(ids).logits)
    assert (got.lm_head.weight is got.model.embed_tokens.weight) == tied


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
