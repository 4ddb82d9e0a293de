"""Muon on the matrices of the layers, AdamW on the rest: by definition, at several layouts, through a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.engines.train.muon import muon_step, orthogonalised
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError
from tests.invariants.training_steps import LOSSES, Case, assemble, build, make_rows, steps
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

MUON = {"optimizer": "Muon", "lr": 1e-2, "weight_decay": 0.1}
COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def matrix(rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """Singular values between 0.5 and 1, random directions."""
    g = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(torch.randn(rows, columns, generator=g, dtype=torch.float64), full_matrices=False)
    return (u * torch.linspace(0.5, 1.0, u.shape[1], dtype=torch.float64)) @ v


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7)])
def test_directions_stay_and_singular_values_follow_the_polynomial(shape: tuple[int, int]) -> None:
    given = matrix(*shape, seed=1)
    u, s, v = torch.linalg.svd(given, full_matrices=False)
    s = s / s.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    found = orthogonalised(given.float(), COEFFICIENTS, 5, 1e-7)
    torch.testing.assert_close(found, ((u * s) @ v).float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_steps_are_those_of_torch_but_for_its_bfloat16(shape: tuple[int, int], adjust: str, nesterov: bool) -> None:
    """Two steps on well-conditioned gradients, where bfloat16 costs 1 per cent of an update and not a tenth."""
    start = matrix(*shape, seed=2).float()
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    muon = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn=adjust, nesterov=nesterov)
    group, state = {**muon.param_groups[0]}, {}
    for seed in (3, 4):
        ours.grad = matrix(*shape, seed=seed).float()
        theirs.grad = ours.grad.clone()
        muon.step()
        with torch.no_grad():
            muon_step(ours, state, group)
    assert float((ours - theirs).detach().norm()) < 0.02 * float((theirs.detach() - start).norm())


def test_matrices_move_by_muon_and_the_rest_by_adamw(folder: str) -> None:
    """One step against both rules on the same gradients (an SGD step of rate 1 shows them)."""
    plain = steps(Case(folder))
    before, after = assemble([plain["before"]]), assemble([plain["after"]])
    moved = assemble([steps(Case(folder, optim=MUON))["after"]])
    for name, start in before.items():
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = start - after[name]
        if ".layers." in name and start.ndim == 2:
            muon = torch.optim.Muon([parameter], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
            with torch.no_grad():
                muon_step(parameter, {}, muon.param_groups[0])
            # The subtraction rounds gradients by 1e-8, and the iteration enlarges that up to 500 times.
            assert float((moved[name] - parameter.data).norm()) < 1e-3 * float((parameter.data - start).norm()), name
        else:
            decay = 0.1 if start.ndim == 2 else 0.0
            torch.optim.AdamW([parameter], lr=1e-2, weight_decay=decay).step()
            # Where a gradient is nearly 0, rounding decides the direction of Adam's first step.
            clear = (start - after[name]).abs() > 1e-6
            torch.testing.assert_close(moved[name][clear], parameter.data[clear], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dims", "tied"),
    [
        (ParallelDims(dp_shard=2), True),
        (ParallelDims(tp=2), True),
        (ParallelDims(pp=2), True),
        (ParallelDims(dp_replicate=2, dp_shard=2), False),
        (ParallelDims(dp_shard=2, tp=2), False),
    ],
    ids=str,
)
def test_three_steps_agree_at_every_layout(dims: ParallelDims, tied: bool, tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path, tied=tied))
    # A large epsilon: AdamW, which moves the rest, would turn rounding of gradients near 0 into steps of their own.
    options: dict[str, Any] = {"optim": {**MUON, "eps": 1e-3}, "steps": 3, "engine": {"grad_clip": 1.0}}
    one = steps(Case(folder, **options))
    ranks = run_ranks(dims.world, steps, Case(folder, dims=dims, **options))
    start, want = assemble([one["before"]]), assemble([one["after"]])
    got = assemble([rank["after"] for rank in ranks])
    for name in want:
        assert float((got[name] - want[name]).norm()) < 1e-3 * float((want[name] - start[name]).norm()), name
    assert ranks[0]["metrics"][2]["loss"] == pytest.approx(one["metrics"][2]["loss"], abs=1e-5)


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
