"""Learning-rate schedules against closed forms written out by hand."""

from __future__ import annotations

import pytest

from hybridflow.config.model import OptimConfig
from hybridflow.engines.train.schedule import Schedule, schedule
from hybridflow.utils.errors import ConfigError


def test_constant_without_warmup_is_one_from_the_first_step() -> None:
    assert [schedule(OptimConfig(), None).factor(k) for k in range(3)] == [1.0, 1.0, 1.0]


def test_constant_with_warmup_rises_linearly() -> None:
    assert [schedule(OptimConfig(lr_warmup_steps=2), None).factor(k) for k in range(4)] == [0.0, 0.5, 1.0, 1.0]


def test_cosine_counts_the_warmup_once() -> None:
    cosine = Schedule(kind="cosine", warmup=22, total=220, floor=0.0)
    assert cosine.factor(198) == pytest.approx(0.030154, abs=1e-6)
    assert cosine.factor(220) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_factor_never_falls_below_the_floor_after_warmup(kind: str) -> None:
    floored = Schedule(kind=kind, warmup=22, total=220, floor=0.1)
    factors = [floored.factor(k) for k in range(22, 300)]
    assert min(factors) == pytest.approx(0.1)
    assert factors == sorted(factors, reverse=True)


def test_linear_is_half_way_at_half_time() -> None:
    assert Schedule(kind="linear", warmup=0, total=10, floor=0.2).factor(5) == pytest.approx(0.6)


def test_a_warmup_ratio_is_a_share_of_all_steps() -> None:
    assert schedule(OptimConfig(lr_warmup_steps_ratio=0.1, lr_scheduler_type="cosine"), 50).warmup == 5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "cosine", "total": None}, "total number of steps"),
        ({"kind": "cosin"}, "choose one of"),
        ({"floor": 1.5}, "0 to 1"),
        ({"warmup": -1}, "0 or more"),
    ],
)
def test_impossible_schedules_are_refused(change: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Schedule(**{"kind": "constant", "warmup": 0, "total": 10, "floor": 0.0, **change})


def test_a_warmup_ratio_of_an_unknown_total_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr_warmup_steps"):
        schedule(OptimConfig(lr_warmup_steps_ratio=0.1), None)
