"""The plan of a run as tables for people."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybridflow.launch.plan import BatchPlan, Finding, PoolPlan, RunPlan
from hybridflow.topology.parallel import ParallelDims

LOG_WIDTH = 120
"""Columns of a log file, where no terminal says how wide it is."""
_UNBROKEN = frozenset({"", "size", "value", "role", "pool", "call", "stage", "asked for by"})
_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[bold red]missing[/]"}


def plan_console() -> Console:
    """A console on stdout that does not squeeze tables into 80 columns when it writes to a file."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=LOG_WIDTH)


def print_plan(plan: RunPlan, console: Console, *, brief: bool = False) -> None:
    """Prints batch plan, placement and memory; without ``brief`` the dataflow and the environment too."""
    console.print(batch_table(plan.batch))
    console.print(placement_table(plan))
    if plan.memory:
        console.print(memory_table(plan))
    if not brief:
        console.print(dataflow_table(plan))
        console.print(environment_table(plan.pools))
    for note in plan.notes:
        console.print(f"[yellow]note[/] {escape(note)}", highlight=False)


def print_findings(findings: Sequence[Finding], console: Console, *, brief: bool = False) -> None:
    """Prints what this machine has and lacks; ``brief``: only what is not in order."""
    shown = [finding for finding in findings if not brief or finding.level != "ok"]
    if not shown:
        return
    table = _table("This machine", "", "asked for by", "found", "what to do")
    for finding in shown:
        table.add_row(_MARKS[finding.level], escape(finding.what), escape(finding.text), escape(finding.fix))
    console.print(table)


def batch_table(batch: BatchPlan) -> Table:
    """Every size with its unit."""
    table = _table("Batch", "size", "value", "unit")
    table.columns[1].justify = "right"
    steps = "from the data files" if batch.total_steps is None else f"{batch.total_steps:,}"
    rows = [
        ("data.train_batch_size", f"{batch.prompts:,}", "prompts per trainer step"),
        ("rollout.n", f"{batch.samples_per_prompt:,}", "samples per prompt"),
        ("sequences", f"{batch.sequences:,}", "sequences per trainer step (prompts x samples)"),
    ]
    if batch.prompts_per_round != batch.prompts:
        rows.append(("data.gen_batch_size", f"{batch.prompts_per_round:,}", "prompts per round of dynamic sampling"))
    for update in batch.updates:
        size = f"{update.mini_batch_prompts:,}"
        unit = f"prompts per optimizer step ({update.mini_batch_sequences:,} sequences)"
        rows.append((f"{update.role} ppo_mini_batch_size", size, unit))
        unit = f"per trainer step ({update.mini_batches:,} mini-batches x {update.epochs} epochs)"
        rows.append((f"{update.role} optimizer steps", f"{update.optimizer_steps:,}", unit))
    for micro in batch.micro:
        value = micro.max_tokens if micro.max_tokens is not None else micro.max_rows
        unit = "tokens" if micro.max_tokens is not None else "sequences"
        per_rank = f"{micro.rows_per_coordinate:,} sequences per data-parallel rank"
        rows.append((f"{micro.role}.{micro.call}", f"{value:,}", f"{unit} per micro-batch, of {per_rank}"))
    validation = "all" if batch.validation_prompts is None else f"{batch.validation_prompts:,}"
    samples = batch.validation_samples_per_prompt
    rows += [
        (
            "data.val_batch_size",
            validation,
            f"prompts per validation round, {samples} sample{'s' * (samples > 1)} each",
        ),
        ("lengths", f"{batch.prompt_length:,} + {batch.response_length:,}", "prompt + response tokens at most"),
        ("context", f"{batch.model_length:,}", "tokens that the generator keeps"),
        ("trainer steps", steps, "in this run"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def placement_table(plan: RunPlan) -> Table:
    """Role, pool, slots and layout."""
    table = _table("Placement", "role", "pool", "slots per node", "device", "layout")
    for role in plan.roles:
        pool = plan.pool(role.pool)
        device = (
            f"{pool.device}, {pool.threads} thread{'s' * (pool.threads > 1)}" if pool.device == "cpu" else pool.device
        )
        layout = describe(role.dims, generator=role.mesh == "rollout")
        table.add_row(role.role, role.pool, " + ".join(map(str, pool.pool.slots)), device, layout)
    return table


def describe(dims: ParallelDims, *, generator: bool = False) -> str:
    """A layout in words."""
    if generator:
        return f"{dims.dp} replica{'s' * (dims.dp > 1)} x tp {dims.tp}"
    parts = [f"{axis} {degree}" for axis, degree in dims.degrees.items() if degree > 1]
    return " x ".join(parts) or "1 rank"


def memory_table(plan: RunPlan) -> Table:
    """Rough bytes per device."""
    table = _table("Memory per device (estimate)", "role", "pool", "call", "held all the time, or during a call")
    for line in plan.memory:
        table.add_row(line.role, line.pool, "", _parts(line.resident))
        for phase, parts in line.phases.items():
            table.add_row("", "", phase, _parts(parts) or "nothing more")
    for pool in plan.pools:
        total = plan.memory_per_device(pool.pool.name)
        if total:
            text = f"[bold]{size(total)}[/]: everything held and the largest call"
            table.add_row("[bold]in all[/]", pool.pool.name, "", text)
    return table


def dataflow_table(plan: RunPlan) -> Table:
    """Who reads and writes what in one step."""
    table = _table("Dataflow of one step", "stage", "role", "call", "reads", "writes")
    before = ""
    for stage in plan.dataflow:
        name = stage.stage if stage.stage != before else ""
        before = stage.stage
        table.add_row(name, stage.role, stage.method, ", ".join(stage.reads), ", ".join(stage.writes))
    return table


def environment_table(pools: Sequence[PoolPlan]) -> Table:
    """Variables that processes get before they import anything."""
    table = _table("Environment of the processes", "pool", "set", "unset")
    for pool in pools:
        variables = "  ".join(f"{name}={value}" for name, value in sorted(pool.environment.items()))
        table.add_row(pool.pool.name, escape(variables), " ".join(pool.unset))
    return table


def size(count: int) -> str:
    """Bytes in words."""
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << scale:
            return f"{count / (1 << scale):.1f} {unit}"
    return f"{count} B"


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold cyan", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in _UNBROKEN)
    return table
