from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.key_rules import RULES
from hybridflow.config.keys import answer, flatten, nest, translate
from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import leaf_names
from hybridflow.config.verl_keys import VERL_KEYS
from hybridflow.utils.errors import ConfigError
from tests.unit.config.trees import tree

USERS_KEYS = (Path(__file__).parent / "verl_keys.txt").read_text().split()


def test_every_key_of_verls_scripts_has_an_answer():
    answers = {key: answer(key) for key in USERS_KEYS}
    assert [key for key, found in answers.items() if found is None or not found.text] == []


def test_the_table_lists_every_key_of_verls_scripts_once():
    assert sorted(VERL_KEYS) == sorted(USERS_KEYS)


def test_a_refused_key_says_what_to_use_and_an_honoured_one_is_refused_by_value_at_most():
    for key in USERS_KEYS:
        _, problems, _ = translate(nest({tuple(key.split(".")): "a value nobody expects"}))
        if answer(key).honoured:
            assert all("not supported (only" in str(p) or "must equal" in str(p) for p in problems), key
        else:
            assert len(problems) == 1, key
            assert problems[0].fix, key


def test_every_new_spelling_is_a_key_of_ours():
    names = leaf_names(PPOConfig)
    for rule in RULES:
        if rule.to is None:
            continue
        stem = rule.to.removesuffix(".**")
        assert stem in names or any(name.startswith(f"{stem}.") for name in names) or answer(stem), rule.to


def test_no_rule_hides_a_key_of_ours():
    from hybridflow.config.keys import rule_for

    hidden = {name for name in leaf_names(PPOConfig) if rule_for(tuple(name.split("."))) is not None}
    assert {name for name in hidden if not name.startswith("critic.model.fsdp_config")} == set()


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("critic.model.fsdp_config.param_offload=true", lambda c: c.critic.fsdp.param_offload, True),
        ("reward_model.enable=false", lambda c: c.reward.reward_model.enable, False),
        ("reward_model.model.path=/m", lambda c: c.reward.reward_model.model.path, "/m"),
        ("reward.reward_model.model_path=/m", lambda c: c.reward.reward_model.model.path, "/m"),
        ("custom_reward_function.path=/f.py", lambda c: c.reward.custom_reward_function.path, "/f.py"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len=3", lambda c: c.reward.overlong.len, 3),
        ("global_profiler.steps=[1,2]", lambda c: c.profiler.steps, (1, 2)),
        ("ray_init.num_cpus=3", lambda c: c.ray_kwargs.ray_init["num_cpus"], 3),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_model_len=64", lambda c: c.model_length, 64),
        (
            "actor_rollout_ref.actor.entropy_checkpointing=true",
            lambda c: c.actor_rollout_ref.actor.fsdp_config.entropy_checkpointing,
            True,
        ),
        (
            "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,2]",
            lambda c: c.actor_rollout_ref.rollout.engine_kwargs["vllm"]["compilation_config"],
            {"cudagraph_capture_sizes": [1, 2]},
        ),
    ],
)
def test_an_older_spelling_arrives_at_the_key_of_ours(override, read, value):
    assert read(load_config(tree(override))) == value


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.ppo_micro_batch_size=null",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.actor.fsdp_config.use_orig_params=true",
        "trainer.use_legacy_worker_impl=disable",
        "data.dataloader_num_workers=8",
        "reward_model.reward_manager=dapo",
        "reward_model.reward_kwargs.max_resp_len=8",
        "actor_rollout_ref.rollout.multi_turn.enable=false",
        "distillation.enabled=false",
        "reward_model.use_reward_loop=true",
        "actor_rollout_ref.model.use_shm=false",
    ],
)
def test_harmless_keys_change_nothing(override):
    assert load_config(tree(override)) == load_config({}) or "use_orig" in override or "mode" in override


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size=4", "ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size=4", "log_prob_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size=4", "log_prob_micro_batch_size_per_gpu"),
        ("critic.ppo_micro_batch_size=4", "critic.ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.actor.veomni.param_offload=true", "strategy=fsdp2"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "tensor_"),
        ("distillation.teacher_models.gsm8k.model_path=/m", "no teacher model"),
        ("data.image_key=images", "text only"),
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "single-turn prompts"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml", "single-turn prompts"),
        ("actor_rollout_ref.rollout.agent.num_workers=8", "single-turn prompts"),
        ("reward_model.sandbox_fusion.url=http://x", "reward.custom_reward_function"),
        ("reward_model.rollout.name=vllm", "micro_batch_size_per_gpu"),
        ("reward_model.reward_kwargs.max_resp_len=9", "data.max_response_length=8"),
        ("global_profiler.tool=nsys", "profiler.steps"),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=x", "name=vllm"),
        ("reward_model.reward_manager=batch", "reward.custom_reward_function"),
    ],
)
def test_a_key_that_we_do_not_have_is_refused_with_advice(override, advice):
    with pytest.raises(ConfigError) as caught:
        load_config(tree(override))
    assert override.partition("=")[0].removeprefix("reward_model.") in str(caught.value)
    assert advice in str(caught.value)


def test_two_values_for_one_key_under_two_spellings_are_refused():
    old, new = "reward_model.num_workers=3", "reward.num_workers=4"
    with pytest.raises(ConfigError, match=r"reward_model\.num_workers=3: means the same as reward\.num_workers=4"):
        load_config(tree(old, new))
    assert load_config(tree(old, "reward.num_workers=3")).reward.num_workers == 3


def test_flattening_and_nesting_are_inverse():
    nested = {"a": {"b": 1, "c": {"d": [1, 2]}, "e": {}}, "f": None}
    assert nest(dict(flatten(nested))) == nested
