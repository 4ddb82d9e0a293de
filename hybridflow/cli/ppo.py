"""``main_ppo``: compose, judge, plan, print; then run, unless it is a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.cli.front import BAD_MACHINE, OK, compose_and_run, report
from hybridflow.cli.show_plan import plan_console, print_findings, print_plan
from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig
from hybridflow.launch.cluster import ClusterStart
from hybridflow.launch.environment import ensure_environment
from hybridflow.launch.findings import fatal
from hybridflow.launch.machine import inspect_machine
from hybridflow.launch.preflight import check_machine, plan_run
from hybridflow.topology.resources import MAIN_POOL
from hybridflow.utils.optional import load

RUN = "hybridflow.launch.build:run"
ABOUT = """\
Trains a language model by PPO, GRPO and their relatives. Without a setting: the built-in arithmetic job.
With your own data: docs/guides/own_task.md. Scripts of verl's: docs/guides/coming_from.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one run; ``argv``: arguments without the program's name."""
    return compose_and_run(PPOConfig, "ppo_trainer", start, argv, about=ABOUT)


def start(tree: dict[str, Any]) -> int:
    """``start_run`` of the configuration that ``tree`` says."""
    return start_run(load_config(tree))


def start_run(config: PPOConfig) -> int:
    """Judges and plans; a dry run ends there, a real run goes on when this machine has all it needs."""
    machine = inspect_machine()
    plan = plan_run(config, machine)
    console = plan_console()
    dry = config.trainer.dry_run
    print_plan(plan, console, brief=not dry)
    findings = check_machine(config, plan, machine)
    print_findings(findings, console, brief=not dry)
    lacking = fatal(findings)
    if lacking is not None and (not dry or config.trainer.strict):
        report(lacking, "This machine cannot run it")
        return BAD_MACHINE
    if dry:
        console.print(
            "Dry run: the configuration is sound." + ("" if lacking is None else " This machine cannot run it.")
        )
        return OK
    main_pool = plan.pool(MAIN_POOL)
    if config.trainer.controller == "local" and main_pool.pool.world == 1:
        ensure_environment(main_pool.environment, main_pool.unset)  # the workers will live in this very process
    cluster = ClusterStart(config)
    return load(RUN)(config, plan, cluster)
