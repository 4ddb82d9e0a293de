from __future__ import annotations

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.config.data import BUILTIN_TASK
from hybridflow.launch.hf_model import facts, find_folder, looks_like_hub_name, read_model
from hybridflow.utils.errors import MachineError
from tests.tiny import save_tiny_model


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_in_the_files_and_from_the_sizes(tmp_path, family, tied):
    folder = save_tiny_model(tmp_path / "m", family=family, tied=tied)
    real = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert read_model(str(folder)).parameters == real
    assert facts(json.loads((folder / "config.json").read_text())).parameters == real


def test_the_embedded_model_is_known_without_its_files():
    found = read_model(BUILTIN_TASK)
    assert (found.heads, found.kv_heads, found.layers) == (4, 2, 3)
    config = AutoConfig.for_model("qwen2")
    assert found.kind == config.model_type


def test_an_override_changes_the_facts(tmp_path):
    folder = save_tiny_model(tmp_path / "m")
    assert read_model(str(folder), {"max_position_embeddings": 9}).context == 9


def test_a_folder_without_config_and_a_config_without_sizes_are_errors(tmp_path):
    with pytest.raises(MachineError, match=r"no config\.json"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(MachineError, match="hidden_size"):
        read_model(str(tmp_path))


def test_a_model_in_the_hub_cache_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_folder("org/model") is None
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert find_folder("org/model") == snapshot


@pytest.mark.parametrize(
    ("path", "hub"), [("org/model", True), ("./org/model", False), ("/a/b", False), ("model", False), ("a/b/c", False)]
)
def test_hub_names_are_told_from_paths(path, hub):
    assert looks_like_hub_name(path) is hub


def test_experts_count(tmp_path):
    dense = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=10, intermediate_size=16)
    few, many = (facts({**dense, "num_experts": n, "moe_intermediate_size": 16}).parameters for n in (1, 5))
    assert many - few == 4 * (3 * 8 * 16 + 8)
