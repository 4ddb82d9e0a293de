"""The names that the configuration allows are the names that the registries hold."""

from __future__ import annotations

import pytest

from hybridflow.algorithms.advantages import ADVANTAGES, NEEDS
from hybridflow.algorithms.aggregation import AGGREGATIONS
from hybridflow.algorithms.kl import KL_CONTROLLERS, base_kind
from hybridflow.algorithms.policy_loss import POLICY_LOSSES
from hybridflow.config import choices
from hybridflow.config.checks import GROUP_ESTIMATORS, VALUE_ESTIMATORS
from hybridflow.config.load import load_config
from hybridflow.config.model import FSDPConfig, MixedPrecisionConfig, ModelConfig
from hybridflow.data.sources import READERS
from hybridflow.engines.rollout.registry import ROLLOUT_ENGINES
from hybridflow.engines.train.parallelize import refuse_unsupported
from hybridflow.engines.train.registry import TRAIN_ENGINES
from hybridflow.engines.train.tensor_parallel import FAMILIES
from hybridflow.engines.train.torch_schedule import SCHEDULES
from hybridflow.topology.parallel import ParallelDims
from hybridflow.trainer.tracking import TRACKERS
from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load
from tests.unit.config.trees import tree


@pytest.mark.parametrize(
    ("names", "registry"),
    [
        (choices.ADV_ESTIMATORS, ADVANTAGES),
        (choices.POLICY_LOSSES, POLICY_LOSSES),
        (choices.LOSS_AGG_MODES, AGGREGATIONS),
        (choices.KL_CONTROLLERS, KL_CONTROLLERS),
        (choices.TRAIN_STRATEGIES, TRAIN_ENGINES),
        (choices.PIPELINE_SCHEDULES, ["1f1b", *SCHEDULES]),
        (choices.ROLLOUT_ENGINES, ROLLOUT_ENGINES),
        (choices.TRACKERS, TRACKERS),
    ],
)
def test_allowed_names_equal_the_registry(names, registry):
    assert sorted(names) == sorted(registry)


def test_model_families_that_can_be_cut_are_those_of_the_engine():
    assert frozenset(choices.PARALLEL_FAMILIES) == FAMILIES


@pytest.mark.parametrize(
    ("override", "model", "sharding"),
    [
        (
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16",
            ModelConfig(),
            FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp16")),
        ),
    ],
)
def test_what_the_training_engine_refuses_is_refused_before_it_starts(override, model, sharding):
    with pytest.raises(ConfigError):
        refuse_unsupported(ParallelDims(), model, sharding)
    with pytest.raises(ConfigError, match=override.partition("=")[0].replace(".", r"\.")):
        load_config(tree(override))


def test_estimators_that_need_values_or_groups_are_those_that_say_so():
    assert {name for name, needs in NEEDS.items() if "values" in needs} == VALUE_ESTIMATORS
    assert set(ADVANTAGES) >= GROUP_ESTIMATORS


def test_every_kl_type_has_an_estimate_and_the_others_are_errors():
    bases = {base_kind(name) for name in choices.KL_TYPES}
    assert {f"{base}{plus}" for base in bases for plus in ("", "+")} <= set(choices.KL_TYPES)
    with pytest.raises(ConfigError):
        base_kind("low_var")


@pytest.mark.parametrize("target", [*TRAIN_ENGINES.values(), *READERS.values()])
def test_every_name_of_a_light_registry_can_be_imported(target):
    assert callable(load(target))
