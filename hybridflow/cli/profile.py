"""``profile``: a short run of ``main_ppo`` with the same overrides that records one step and prints where it went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridflow.cli.front import compose_and_run
from hybridflow.cli.ppo import start_run
from hybridflow.config.checks import planned_steps
from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig

ABOUT = """\
Runs main_ppo with the same settings, records step 2 (or profiler.steps=[N]) call by call, prints where its time and
memory went, and ends. Outputs go to the run's folder with -profile behind its name."""
USUAL_STEP = 2
"""Recorded when ``profiler.steps`` names none: the first step has what happens only once in it."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one run; ``argv``: arguments without the program's name."""

    def task(tree: dict[str, Any]) -> int:
        return start_run(recorded(load_config(tree)))

    return compose_and_run(PPOConfig, "ppo_trainer", task, argv, about=ABOUT)


def recorded(config: PPOConfig) -> PPOConfig:
    """The same run in a folder of its own, ended behind its last recorded step, without validation or checkpoint."""
    steps = config.profiler.steps or (min(USUAL_STEP, planned_steps(config) or USUAL_STEP),)
    trainer = replace(
        config.trainer,
        default_local_dir=f"{config.trainer.default_local_dir}-profile",
        val_before_train=False,
        val_only=False,
        test_freq=-1,
        save_freq=-1,
    )
    return replace(config, trainer=trainer, profiler=replace(config.profiler, steps=steps, end_run=True))
