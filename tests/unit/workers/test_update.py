"""The learning-rate schedule of a trainer step, and what a step reports of its costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridflow.engines.train.base import MicroBatching
from hybridflow.workers.peak_memory import PeakMemory
from hybridflow.workers.update import Schedule, update_epochs
from tests.invariants.training_steps import LOSSES, Case, build, make_rows
from tests.tiny import save_tiny_model

LINEAR = {"optimizer": "AdamW", "lr": 1.0e-3, "lr_scheduler_type": "linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def learn(engine: Any, schedule: Schedule) -> dict[str, float]:
    rows = make_rows(8).with_columns(row_index=torch.arange(8))
    return update_epochs(
        engine,
        rows,
        LOSSES["lm"],
        schedule=schedule,
        temperature=1.0,
        micro=MicroBatching(max_tokens=40),
        total_rows=8,
        step=1,
        prefix="actor",
    )


def schedule_of(unit: str) -> Schedule:
    return Schedule(mini_rows=4, group_size=2, epochs=2, shuffle_seed=None, unit=unit)


def test_a_trainer_step_advances_the_schedule_once_and_reports_the_rate_it_used(folder: str) -> None:
    schedule = schedule_of("trainer_step")
    assert schedule.units(5, 8) == 5
    engine = build(Case(folder, optim=LINEAR, engine={"total_steps": schedule.units(5, 8)}))
    assert [learn(engine, schedule)["actor/lr"] for _ in range(3)] == pytest.approx([1e-3, 0.8e-3, 0.6e-3])


def test_by_choice_every_optimizer_step_advances_it(folder: str) -> None:
    schedule = schedule_of("optimizer_step")
    assert schedule.units(5, 8) == 20  # 2 mini-batches x 2 epochs
    assert schedule.units(None, 8) is None
    engine = build(Case(folder, optim=LINEAR, engine={"total_steps": schedule.units(5, 8)}))
    found = [learn(engine, schedule) for _ in range(2)]
    assert [step["actor/optimizer_steps"] for step in found] == [4, 4]
    # The last of the four optimizer steps of a trainer step used the rate after 3 and after 7 ticks.
    assert [step["actor/lr"] for step in found] == pytest.approx([1e-3 * 17 / 20, 1e-3 * 13 / 20])


def test_a_step_reports_its_costs(folder: str) -> None:
    engine = build(Case(folder))
    metrics = learn(engine, schedule_of("trainer_step"))
    assert 0 < metrics["perf/mfu/actor"] < 1.5
    assert metrics["perf/tokens_per_second_per_device/actor"] > 0
    assert metrics["perf/padding_share/actor"] == 0.0 and metrics["perf/imbalance/actor"] == 1.0


def test_the_peak_starts_anew() -> None:
    peak = PeakMemory("cpu")
    peak.reset()
    torch.ones(50_000_000)  # 200 MB, touched
    large = peak.bytes()
    peak.reset()
    assert large - peak.bytes() > 150e6
