"""What an engine says of its storage must be what the rules predict, or the run stops before the first publish."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import AutoConfig

from hybridflow.config.actor import RolloutConfig
from hybridflow.engines.rollout.base import EngineParameters
from hybridflow.engines.rollout.hf import HFEngine
from hybridflow.hybrid_engine import rules
from hybridflow.hybrid_engine.start_check import check_layout
from hybridflow.utils.errors import EngineError
from tests.tiny import save_tiny_model


@pytest.fixture(scope="module")
def engine_and_config(tmp_path_factory):
    folder = str(save_tiny_model(tmp_path_factory.mktemp("model")))
    engine = HFEngine(
        model_path=folder, config=RolloutConfig(), max_prompt_tokens=8, max_response_tokens=8, tp=1, device="cpu"
    )
    return engine.parameters(), AutoConfig.from_pretrained(folder)


def test_an_engine_that_stores_what_the_rules_predict_passes(engine_and_config):
    parameters, config = engine_and_config
    assert check_layout(parameters, config, tp=1, tp_rank=0)


def test_a_block_in_another_place_is_named_with_both_blocks(engine_and_config):
    parameters, config = engine_and_config
    moved = [
        replace(part, hf_box=((0, 32), part.hf_box[1])) if part.hf_name == "model.layers.1.mlp.up_proj.weight" else part
        for part in parameters.parts
    ]
    with pytest.raises(EngineError, match="as the sharding rules predict; nothing was written") as caught:
        check_layout(EngineParameters(tuple(moved)), config, tp=1, tp_rank=0)
    [line] = str(caught.value).splitlines()[1:]
    assert line.startswith("model.layers.1.mlp.up_proj.weight: the rule 'column' predicts (((0, 128), (0, 64)),)")
    assert "the engine holds (((0, 32), (0, 64)),)" in line


def test_a_parameter_that_the_engine_lacks_or_invents_is_named(engine_and_config):
    parameters, config = engine_and_config
    parts = (replace(parameters.parts[0], hf_name="model.extra.weight"), *parameters.parts[1:])
    with pytest.raises(EngineError) as caught:
        check_layout(EngineParameters(parts), config, tp=1, tp_rank=0)
    assert "model.extra.weight: the engine holds" in str(caught.value)
    assert "model.embed_tokens.weight: the rule 'vocabulary' predicts" in str(caught.value)


def test_an_architecture_without_rules_is_taken_at_the_engines_word_and_told_so(engine_and_config, monkeypatch, caplog):
    parameters, config = engine_and_config
    monkeypatch.delitem(rules.RULES, "Qwen2ForCausalLM")
    assert not check_layout(parameters, config, tp=1, tp_rank=0)
    assert "no sharding rules for Qwen2ForCausalLM" in caplog.text
