"""Muon on the matrices of the layers, AdamW on the rest, on one rank and through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.engines.train.parallelize import refuse_unsupported
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError
from tests.invariants.training_steps import LOSSES, Case, assemble, build, make_rows, steps
from tests.tiny import save_tiny_model

MUON = {"optimizer": "Muon", "lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def test_matrices_move_by_muon_and_the_rest_by_adamw(folder: str) -> None:
    """One step against torch's own optimizers on the same gradients (an SGD step of rate 1 shows them)."""
    plain = steps(Case(folder))
    before, after = assemble([plain["before"]]), assemble([plain["after"]])
    moved = assemble([steps(Case(folder, optim=MUON))["after"]])
    for name, start in before.items():
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = start - after[name]
        if ".layers." in name and start.ndim == 2:
            torch.optim.Muon([parameter], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
            # Newton-Schulz runs in bf16 and enlarges small directions: a step of AdamW would be 100 per cent off.
            assert float((moved[name] - parameter.data).norm()) < 0.1 * float((parameter.data - start).norm()), name
        else:
            decay = 0.1 if start.ndim == 2 else 0.0
            torch.optim.AdamW([parameter], lr=1e-2, weight_decay=decay).step()
            # Where a gradient is nearly 0, rounding decides the direction of Adam's first step.
            clear = (start - after[name]).abs() > 1e-6
            torch.testing.assert_close(moved[name][clear], parameter.data[clear], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dims", [ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(pp=2)], ids=str)
def test_more_than_one_rank_is_refused_before_anything_is_built(folder: str, dims: ParallelDims) -> None:
    sharding = FSDPConfig()
    with pytest.raises(ConfigError, match="Muon works on one rank so far, and this layout has 2"):
        refuse_unsupported(dims, ModelConfig(path=folder), sharding, optimizer="Muon")
    refuse_unsupported(dims, ModelConfig(path=folder), sharding, optimizer="AdamW")


def test_a_checkpoint_restores_both(folder: str, tmp_path: Path) -> None:
    rows = make_rows(8)

    def update(engine) -> None:
        counts = engine.counts(rows)
        engine.update(rows, LOSSES["lm"], temperature=1.0, micro=Case(folder).micro, counts=counts)

    engine = build(Case(folder, optim=MUON))
    update(engine)
    engine.save(str(tmp_path))
    other = build(Case(folder, optim=MUON))
    other.load(str(tmp_path))
    update(engine)
    update(other)
    for mine, theirs in zip(engine.shards(), other.shards(), strict=True):
        assert torch.equal(mine.local, theirs.local), mine.name


def test_the_rate_reaches_both(folder: str) -> None:
    engine = build(Case(folder, optim={**MUON, "lr_warmup_steps": 2}))
    engine.schedule_step()
    assert {group["lr"] for part in engine._optimizer._parts for group in part.param_groups} == {5e-3}


def test_arguments_that_muon_does_not_take_are_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="does not fit Muon"):
        build(Case(folder, optim={**MUON, "override_optimizer_config": {"no_such": 1}}))
