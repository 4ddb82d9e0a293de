from __future__ import annotations

import pytest

from hybridflow.config.checks import divisor_near, planned_steps
from hybridflow.config.load import load_config
from hybridflow.utils.errors import ConfigError
from tests.unit.config.trees import tree

SAMPLES = "actor_rollout_ref.rollout.n"


@pytest.mark.parametrize(
    ("number", "wanted", "expected"),
    [(64, 24, 16), (64, 200, 64), (12, 5, 4), (7, 3, 1), (1, 9, 1), (36, 6, 6)],
)
def test_the_suggested_size_is_the_nearest_divisor(number, wanted, expected):
    assert divisor_near(number, wanted) == expected


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ((), 2048 // 64),
        (("trainer.total_epochs=3",), 3 * (2048 // 64)),
        (("data.generated_size=100",), 1),
        (("trainer.total_training_steps=7", "data.train_files=x.parquet"), 7),
        (("data.train_files=x.parquet",), None),
        (("data.train_max_samples=128",), 2),
    ],
)
def test_the_number_of_steps_follows_from_the_configuration_where_it_can(overrides, steps):
    assert planned_steps(load_config(tree(*overrides))) == steps


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=gae", f"{SAMPLES}=1"),
        ("algorithm.adv_estimator=remax", f"{SAMPLES}=1"),
        ("algorithm.adv_estimator=my.module:estimator", f"{SAMPLES}=1"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=my.module:loss",),
        ("trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"),
        ("trainer.n_gpus_per_node=4", "trainer.nnodes=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=4"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "data.max_prompt_length=20000",
         "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4"),
        ("algorithm.adv_estimator=gae", "trainer.pools.values.slots=[2]", "trainer.pools.values.roles=[critic]"),
        ("trainer.pools.sampling.slots=[2]", "trainer.pools.sampling.roles=[rollout]",
         "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "actor_rollout_ref.hybrid_engine=False"),
        ("trainer.pools.sampling.slots=[1]", "trainer.pools.sampling.roles=[rollout]", "trainer.controller=local"),
        ("algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'",
         "algorithm.rollout_correction.rollout_rs_threshold='0.5_2,0.1'"),
    ],
)  # fmt: skip
def test_what_can_work_is_let_through(overrides):
    load_config(tree(*overrides))


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("actor_rollout_ref.hybrid_engine=False",), "actor_rollout_ref.hybrid_engine",
         "Set trainer.pools.rollout.slots=[N] and trainer.pools.rollout.roles=[rollout]."),
        (("trainer.n_gpus_per_node=4", "trainer.pools.sampling.slots=[3]", "trainer.pools.sampling.roles=[rollout]",
          "actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
         "actor_rollout_ref.rollout.tensor_model_parallel_size", "3 (trainer.pools.sampling.slots)"),
    ],
)  # fmt: skip
def test_a_generator_on_its_own_devices_needs_a_pool_that_fits(overrides, key, words):
    with pytest.raises(ConfigError) as caught:
        load_config(tree(*overrides))
    assert key in str(caught.value) and words in str(caught.value)


def test_micro_batches_go_by_tokens_unless_their_size_is_given():
    # A verl script that sets only the size means that size; its default of use_dynamic_bsz is False.
    given = load_config(tree("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"))
    assert given.actor_rollout_ref.actor.use_dynamic_bsz is None
    both = load_config(
        tree("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3", "actor_rollout_ref.actor.use_dynamic_bsz=true")
    )
    assert both.actor_rollout_ref.actor.use_dynamic_bsz is True
