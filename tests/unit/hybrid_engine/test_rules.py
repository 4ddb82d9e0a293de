"""Sharding rules: cuts by hand, coverage of real architectures, errors that say what to add."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.hybrid_engine.boxes import intersect, volume
from hybridflow.hybrid_engine.layouts import generation_difference
from hybridflow.hybrid_engine.rules import (
    RULES,
    Heads,
    Place,
    ShardingRule,
    generation_boxes,
    register_rules,
    row_parallel,
    rule_for,
    rules_of,
)
from hybridflow.hybrid_engine.shapes import model_shapes
from hybridflow.utils.errors import ConfigError
from tests.unit.hybrid_engine.cases import tiny_shapes

LAYER = "model.layers.3."
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 70,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
}


def boxes(name, shape, tp, rank, architecture="Qwen2ForCausalLM", heads=4, kv_heads=2, **options):
    place = Place(tp=tp, tp_rank=rank, heads=Heads(query=heads, key_value=kv_heads, size=8))
    return generation_boxes(rule_for(architecture, name), name, shape, place, **options)


@pytest.mark.parametrize(
    ("name", "shape", "rank", "expected"),
    [
        ("self_attn.q_proj.weight", (32, 16), 1, ((8, 16), (0, 16))),
        ("self_attn.q_proj.bias", (32,), 3, ((24, 32),)),
        ("self_attn.k_proj.weight", (16, 16), 1, ((0, 8), (0, 16))),  # two kv heads over four ranks: 0, 0, 1, 1
        ("self_attn.v_proj.weight", (16, 16), 2, ((8, 16), (0, 16))),
        ("self_attn.o_proj.weight", (16, 32), 2, ((0, 16), (16, 24))),
        ("self_attn.o_proj.bias", (16,), 2, ((0, 16),)),
        ("mlp.gate_proj.weight", (48, 16), 2, ((24, 36), (0, 16))),
        ("mlp.down_proj.weight", (16, 48), 2, ((0, 16), (24, 36))),
        ("input_layernorm.weight", (16,), 2, ((0, 16),)),
    ],
)
def test_cuts_over_four_ranks_by_hand(name, shape, rank, expected):
    assert boxes(LAYER + name, shape, 4, rank) == (expected,)


def test_vocabulary_is_cut_after_padding_to_64():
    rows = [boxes("lm_head.weight", (70, 4), 4, rank)[0][0] for rank in range(4)]
    assert rows == [(0, 32), (32, 64), (64, 70), (70, 70)]  # 128 padded rows; the last rank holds padding only


def test_stacked_experts_are_cut_inside_each_expert_or_by_expert():
    name, shape = LAYER + "mlp.experts.gate_up_proj", (5, 12, 8)
    gate, up = boxes(name, shape, 2, 1, "Qwen3MoeForCausalLM")
    assert (gate, up) == (((0, 5), (3, 6), (0, 8)), ((0, 5), (9, 12), (0, 8)))
    whole = [boxes(name, shape, 2, rank, "Qwen3MoeForCausalLM", expert_parallel=True) for rank in range(2)]
    assert whole == [(((0, 3), (0, 12), (0, 8)),), (((3, 5), (0, 12), (0, 8)),)]


def test_experts_one_by_one_are_cut_as_the_stacked_ones_are():
    experts, inner, hidden, tp = 3, 8, 4, 2
    stacked_in, stacked_out = (experts, 2 * inner, hidden), (experts, hidden, inner)
    for rank in range(tp):
        gate, up = boxes(LAYER + "mlp.experts.gate_up_proj", stacked_in, tp, rank, "Qwen3MoeForCausalLM")
        [down] = boxes(LAYER + "mlp.experts.down_proj", stacked_out, tp, rank, "Qwen3MoeForCausalLM")
        for expert in range(experts):
            prefix = f"{LAYER}mlp.experts.{expert}."
            [one] = boxes(prefix + "gate_proj.weight", (inner, hidden), tp, rank, "Qwen3MoeForCausalLM")
            [two] = boxes(prefix + "up_proj.weight", (inner, hidden), tp, rank, "Qwen3MoeForCausalLM")
            [three] = boxes(prefix + "down_proj.weight", (hidden, inner), tp, rank, "Qwen3MoeForCausalLM")
            assert one == two == gate[1:] and three == down[1:]
            assert tuple(n - inner for n in up[1]) == two[0]
        with pytest.raises(ConfigError, match="expert parallelism needs the experts of a layer stacked"):
            boxes(prefix + "up_proj.weight", (inner, hidden), tp, rank, "Qwen3MoeForCausalLM", expert_parallel=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_parameter_of_every_family_is_covered_exactly(family, tp):
    model = model_shapes(AutoConfig.for_model(family, **SIZES, **FAMILIES[family]))
    for name, shape in model.shapes.items():
        rule = rule_for(model.architecture, name)
        found = {
            box
            for rank in range(tp)
            for box in generation_boxes(rule, name, shape, Place(tp=tp, tp_rank=rank, heads=model.heads))
            if volume(box)
        }
        assert sum(volume(box) for box in found) == torch.Size(shape).numel(), name
        assert all(intersect(one, other) is None for one in found for other in found if one != other), name


def test_row_parallel_weights_are_those_that_are_cut_along_dim_1():
    for name, shape in tiny_shapes(bias=True).shapes.items():
        assert row_parallel(name) == (rule_for("Qwen2ForCausalLM", name).cut == "row" and len(shape) == 2)


def test_an_unknown_parameter_names_itself_its_module_and_the_missing_rule():
    with pytest.raises(ConfigError) as caught:
        rule_for("Qwen2ForCausalLM", "model.layers.7.self_attn.sinks.scale")
    text = str(caught.value)
    assert "'model.layers.7.self_attn.sinks.scale'" in text
    assert "module 'model.layers.7.self_attn.sinks'" in text
    assert r'ShardingRule(pattern=r"model\.layers\.\d+\.self_attn\.sinks\.scale", cut=...)' in text


def test_an_unknown_architecture_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'Qwen3ForCausalLM'"):
        rules_of("Qwen4ForCausalLM")


def test_an_unknown_cut_is_refused():
    with pytest.raises(ConfigError, match="cut='diagonal' is unknown; use one of replicated, column"):
        ShardingRule(pattern="x", cut="diagonal")


def test_a_users_own_model_is_added_by_the_hook():
    rules = (*RULES["LlamaForCausalLM"], ShardingRule(pattern=r".*\.self_attn\.sinks", cut="replicated"))
    try:
        register_rules("MyForCausalLM", rules)
        assert rule_for("MyForCausalLM", "model.layers.0.self_attn.sinks").cut == "replicated"
    finally:
        del RULES["MyForCausalLM"]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("self_attn.q_proj.weight", (32, 16), "4 query heads over tp=3 does not divide"),
        ("self_attn.k_proj.weight", (16, 16), "2 key-value heads over tp=3 does not divide"),
        ("mlp.gate_proj.weight", (50, 16), "50 entries of dim 0 over tp=3 does not divide"),
    ],
)
def test_cuts_that_do_not_divide_name_the_parameter(name, shape, message):
    with pytest.raises(ConfigError, match=message) as caught:
        boxes(LAYER + name, shape, 3, 0)
    assert name in str(caught.value)


def test_the_difference_between_rules_and_an_engine_is_told_per_parameter():
    model = tiny_shapes(layers=1)
    held = {
        name: tuple(
            generation_boxes(rule_for(model.architecture, name), name, shape, Place(tp=2, tp_rank=1, heads=model.heads))
        )
        for name, shape in model.shapes.items()
    }
    assert generation_difference(model, held, tp=2, tp_rank=1) == []
    held["model.layers.0.mlp.down_proj.weight"] = (((0, 32), (0, 20)),)  # rank 0's block
    del held["model.norm.weight"]
    held["model.extra"] = (((0, 1),),)
    lines = generation_difference(model, held, tp=2, tp_rank=1)
    assert [line.split(":")[0] for line in lines] == [
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
        "model.extra",
    ]
    assert "predicts (((0, 32), (20, 40)),) at tp=2 rank 1, the engine holds (((0, 32), (0, 20)),)" in lines[0]


def test_shapes_of_a_config_are_those_of_the_real_model():
    config = AutoConfig.for_model("qwen2", **SIZES, tie_word_embeddings=True)
    real = AutoModelForCausalLM.from_config(config)
    assert model_shapes(config).shapes == {name: tuple(p.shape) for name, p in real.named_parameters()}
    assert "lm_head.weight" not in model_shapes(config).shapes
