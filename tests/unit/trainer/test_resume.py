"""What a resume says about a configuration that changed."""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase

import pytest

from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import leaf_names
from hybridflow.trainer.resume import LENGTH, NO_EFFECT, ROUNDING, changes, plain_config, tell_changes, tell_versions
from tests.jobs import small_config

MATTERS, ROUNDS, NOTHING = "changes the run", "other rounding only", "no effect on results"


@pytest.mark.parametrize(
    ("key", "value", "weight"),
    [
        ("actor_rollout_ref.actor.optim.lr", 1e-4, MATTERS),
        ("actor_rollout_ref.rollout.n", 8, MATTERS),
        ("trainer.seed", 2, MATTERS),
        ("algorithm.adv_estimator", "rloo", MATTERS),
        ("trainer.n_gpus_per_node", 2, ROUNDS),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 1, ROUNDS),
        ("trainer.total_training_steps", 9, NOTHING),
        ("trainer.logger", ["console"], NOTHING),
        ("trainer.save_freq", 3, NOTHING),
        ("actor_rollout_ref.actor.checkpoint.async_save", True, NOTHING),
        ("actor_rollout_ref.rollout.val_kwargs.n", 2, NOTHING),
    ],
)
def test_a_changed_key_is_named_with_what_it_means(tmp_path, key, value, weight):
    before = plain_config(small_config(tmp_path))
    (found,) = changes(before, small_config(tmp_path, **{key: value}))
    assert (found.key, found.weight) == (key, weight)
    assert found.before != found.now


def test_the_length_matters_where_a_schedule_ends_with_the_run(tmp_path):
    cosine = {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"}
    before = plain_config(small_config(tmp_path, **cosine))
    (found,) = changes(before, small_config(tmp_path, **cosine, **{"trainer.total_training_steps": 9}))
    assert found.weight == MATTERS


def test_the_table_puts_what_matters_first_and_is_a_warning(tmp_path, caplog):
    before = plain_config(small_config(tmp_path))
    now = small_config(tmp_path, **{"trainer.save_freq": 3, "trainer.seed": 7})
    with caplog.at_level(logging.INFO, logger="hybridflow"):
        tell_changes(before, now)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "2 keys differ" in record.getMessage() and "1 of them" in record.getMessage()
    assert record.getMessage().index("trainer.seed") < record.getMessage().index("trainer.save_freq")


def test_an_equal_configuration_and_equal_versions_say_nothing(tmp_path, caplog):
    config = small_config(tmp_path)
    with caplog.at_level(logging.INFO, logger="hybridflow"):
        tell_changes(plain_config(config), config)
        tell_versions({"torch": "2"}, {"torch": "2"})
    assert caplog.records == []


def test_a_key_of_another_version_is_a_change_not_a_crash(tmp_path):
    config = small_config(tmp_path)
    before = plain_config(config)
    before["trainer"]["was_there_once"] = 1
    del before["trainer"]["seed"]
    assert {(found.key, found.before, found.now) for found in changes(before, config)} == {
        ("trainer.was_there_once", 1, None),
        ("trainer.seed", None, 1),
    }


def test_every_pattern_names_a_key_that_exists():
    names = list(leaf_names(PPOConfig))
    idle = [pattern for pattern in (*NO_EFFECT, *ROUNDING, *LENGTH) if not any(fnmatchcase(n, pattern) for n in names)]
    assert idle == []


def test_other_versions_are_named(tmp_path, caplog):
    tell_versions({"torch": "1", "python": "3"}, {"torch": "2", "python": "3"})
    assert "torch 1 -> 2" in caplog.text and "python" not in caplog.text.replace("hybridflow", "")
