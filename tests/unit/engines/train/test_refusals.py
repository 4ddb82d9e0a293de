"""Layouts that cannot work are refused at start, with the arithmetic."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.engines.train.parallelize import refuse_unsupported
from hybridflow.engines.train.pipeline import _one_forward_one_backward
from hybridflow.models.liger import use_liger
from hybridflow.models.load import empty_causal_lm
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError
from tests.invariants.training_steps import Case, build
from tests.ranks import RankError, run_ranks
from tests.tiny import save_tiny_model


def attempt(case: Case) -> None:
    build(case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("dims", "options", "match"),
    [
        (ParallelDims(tp=4), {}, r"2 key-value heads / tp 4 is no whole number"),
        (ParallelDims(pp=3), {}, r"pipeline parallel size 3 is more than the model's 2 layers"),
        (ParallelDims(sp=3), {}, r"4 attention heads / \(tp 1 x sp 3\)"),
        (ParallelDims(tp=2), {"engine": {"shard_order": [1, 0]}}, r"shard_order works with data parallelism alone"),
        (ParallelDims(dp_shard=2), {"engine": {"shard_order": [0, 0]}}, r"no permutation of ranks 0\.\.1"),
    ],
)
def test_impossible_layouts_say_why(folder: str, dims: ParallelDims, options: dict[str, Any], match: str) -> None:
    with pytest.raises(RankError, match=match):
        run_ranks(dims.world, attempt, Case(folder, dims=dims, **options))


def test_liger_kernels_are_refused_where_they_cannot_run(folder: str) -> None:
    with pytest.raises(ConfigError, match="liger's kernels run on GPUs, and this is cpu"):
        build(Case(folder, model={"use_liger": True}))
    with pytest.raises(ConfigError, match="take no weights cut over tp 2"):
        refuse_unsupported(ParallelDims(tp=2), ModelConfig(use_liger=True), FSDPConfig(), device="cuda:0")


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_missing_liger_kernels_are_named_with_the_extra_that_brings_them(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"needs the package liger-kernel \(hybridflow\[liger\]\)"):
        use_liger(empty_causal_lm(folder))


def test_a_world_of_another_size_is_named(folder: str) -> None:
    with pytest.raises(RankError, match="is for 4 ranks, the process group has 2"):
        run_ranks(2, attempt, Case(folder, dims=ParallelDims(dp_shard=4)))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_stage_runs_every_micro_batch_once_forward_then_backward(stages: int, count: int) -> None:
    for stage in range(stages):
        order = list(_one_forward_one_backward(count, stage, stages))
        for kind in ("forward", "backward"):
            assert [k for what, k in order if what == kind] == list(range(count))
        in_flight, most = 0, 0
        for kind, k in order:
            in_flight += 1 if kind == "forward" else -1
            most = max(most, in_flight)
            assert kind == "forward" or order.index(("forward", k)) < order.index((kind, k))
        assert most == min(stages - stage, count), "1F1B holds no more activations than stages behind it"
