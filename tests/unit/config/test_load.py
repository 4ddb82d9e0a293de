from __future__ import annotations

import dataclasses
import pickle

import pytest

from hybridflow.config.load import load_config
from hybridflow.config.model import OptimConfig
from hybridflow.config.problems import InvalidConfigError
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import defaults_tree
from hybridflow.utils.errors import ConfigError
from tests.unit.config.trees import tree


def faults(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(tree(*overrides))
    assert isinstance(caught.value, InvalidConfigError)
    return [str(problem) for problem in caught.value.problems]


def test_an_empty_tree_gives_the_defaults():
    assert load_config({}) == PPOConfig()


def test_the_generated_defaults_tree_gives_the_defaults():
    assert load_config(defaults_tree(PPOConfig)) == PPOConfig()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.trian_batch_size=4", "data.train_batch_size"),
        ("data.train_files_=x", "data.train_files"),
        ("trainer.n_gpu_per_node=4", "trainer.n_gpus_per_node"),
        ("algorithm.kl_ctrl.kl_coeff=0.1", "algorithm.kl_ctrl.kl_coef"),
        ("actor_rolout_ref.actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("data.n=4", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.actor.lr=4", "actor_rollout_ref.actor.optim.lr"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(override, expected):
    (fault,) = faults(override)
    assert fault.startswith(override.partition("=")[0] + ": no such key")
    assert f"Did you mean {expected}?" in fault


def test_an_unknown_key_with_no_near_one_lists_the_keys_of_its_section():
    (fault,) = faults("data.zzzzzz=1")
    assert "train_batch_size" in fault
    assert "max_prompt_length" in fault


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("data.train_batch_size=many", "must be an integer"),
        ("data.train_batch_size=2.5", "must be an integer. Use 2 or 3."),
        ("data.train_batch_size=true", "must be an integer"),
        ("data.train_batch_size=[1,2]", "must be an integer"),
        ("data.train_batch_size=null", "must be an integer"),
        ("data.shuffle=maybe", "must be true or false"),
        ("data.shuffle=1", "must be true or false"),
        ("actor_rollout_ref.actor.optim.lr=fast", "must be a number"),
        ("actor_rollout_ref.actor.optim.lr=.nan", "must be a number"),
        ("actor_rollout_ref.actor.optim.lr=.inf", "must be a number"),
        ("trainer.project_name=[a]", "must be text"),
        ("trainer.project_name=null", "must be text"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "must be a list of 2 number"),
        ("profiler.steps=[1,x]", "must be an integer"),
        ("trainer=5", "is a section, not a value"),
        ("ray_kwargs.ray_init=5", "must be a mapping"),
        ("trainer.pools.judge=3", "is a section, not a value"),
        ("trainer.default_local_dir='${oops.here}'", "unresolved interpolation"),
        ("data.val_batch_size=None", "Write null"),
    ],
)
def test_a_wrong_type_says_what_is_wanted(override, wanted):
    (fault,) = faults(override)
    assert fault.startswith(override.partition("=")[0])
    assert wanted in fault


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("trainer.logger=console", lambda c: c.trainer.logger, ("console",)),
        ("trainer.logger=[console,wandb]", lambda c: c.trainer.logger, ("console", "wandb")),
        ("data.train_files=a.parquet", lambda c: c.data.train_files, ("a.parquet",)),
        ("actor_rollout_ref.actor.optim.lr='1e-6'", lambda c: c.actor_rollout_ref.actor.optim.lr, 1e-6),
        ("actor_rollout_ref.actor.optim.lr=1", lambda c: c.actor_rollout_ref.actor.optim.lr, 1.0),
        ("actor_rollout_ref.actor.optim.betas=[0.5,0.6]", lambda c: c.actor_rollout_ref.actor.optim.betas, (0.5, 0.6)),
        ("trainer.total_epochs='1e1'", lambda c: c.trainer.total_epochs, 10),
        ("trainer.total_epochs=10.0", lambda c: c.trainer.total_epochs, 10),
        ("trainer.experiment_name=7", lambda c: c.trainer.experiment_name, "7"),
        ("data.shuffle='False'", lambda c: c.data.shuffle, False),
        ("data.val_batch_size=null", lambda c: c.data.val_batch_size, None),
        ("actor_rollout_ref.actor.clip_ratio_low=1", lambda c: c.actor_rollout_ref.actor.clip_ratio_low, 1.0),
        ("profiler.steps=3", lambda c: c.profiler.steps, (3,)),
        ("ray_kwargs.ray_init.num_cpus=4", lambda c: c.ray_kwargs.ray_init, {"num_cpus": 4}),
    ],
)
def test_what_users_write_is_read_as_the_type_of_the_key(override, read, value):
    found = read(load_config(tree(override)))
    assert found == value
    assert type(found) is type(value)


def test_a_union_keeps_the_type_that_was_written():
    key = "algorithm.rollout_correction.rollout_rs_threshold"
    found = [load_config(tree(f"{key}={v}", f"{key.removesuffix('_threshold')}=token_k1")) for v in ("'0.5_2'", "2")]
    assert [config.algorithm.rollout_correction.rollout_rs_threshold for config in found] == ["0.5_2", 2.0]


def test_pools_become_dataclasses_by_name():
    config = load_config(
        tree("trainer.pools.values.slots=2", "trainer.pools.values.roles=[critic]", "algorithm.adv_estimator=gae")
    )
    assert config.trainer.pools["values"].slots == (2,)
    assert config.pool_of("critic") == "values"
    assert config.world_of("critic") == 2


def test_all_faults_come_together_most_telling_first():
    found = faults(
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=48",
        "data.truncation=lef",
        "data.nosuchkey_at_all=1",
    )
    assert [fault.partition("=")[0].partition(":")[0] for fault in found] == [
        "data.nosuchkey_at_all",
        "data.truncation",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
    ]


def test_one_slip_is_one_message():
    # What depends on an unreadable value is not judged by the default that stands in for it.
    assert len(faults("data.train_batch_size=sixteen", "actor_rollout_ref.actor.ppo_mini_batch_size=128")) == 1
    assert len(faults("algorithm.adv_estimator=grppo", "actor_rollout_ref.rollout.n=1")) == 1


def test_the_error_survives_pickling_and_still_lists_its_faults():
    with pytest.raises(ConfigError) as caught:
        load_config(tree("data.train_batch_size=x", "trainer.total_epochs=0"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is InvalidConfigError
    assert str(again) == str(caught.value)
    assert "1. data.train_batch_size=x" in str(again)


def test_a_config_built_in_python_is_judged_like_a_loaded_one():
    with pytest.raises(ConfigError, match="lr=-1"):
        OptimConfig(lr=-1)
    with pytest.raises(ConfigError, match="ppo_mini_batch_size"):
        dataclasses.replace(PPOConfig(), data=dataclasses.replace(PPOConfig().data, train_batch_size=8))


def test_nobody_can_write_to_a_config():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().data.train_batch_size = 3


def test_the_run_folder_is_named_after_the_run_also_without_hydra():
    config = load_config(tree("trainer.project_name=p", "trainer.experiment_name=e"))
    assert config.trainer.default_local_dir == "outputs/p/e"
    assert load_config(tree("trainer.default_local_dir=/tmp/x")).trainer.default_local_dir == "/tmp/x"
