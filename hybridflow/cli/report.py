"""Curves of one or more runs, drawn from their ``metrics.jsonl``: where people would rather look than read."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from hybridflow.utils.errors import DataError

METRICS_FILE = "metrics.jsonl"
STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes."""

    title: str
    prefixes: tuple[str, ...]
    """Metrics that are drawn: equal to a prefix, or under it when it ends in a slash. Absent ones are skipped."""
    markers: bool = False
    zeros: bool = True
    """Whether a metric is drawn that is 0 throughout (the KL of an update is, where each token is trained once)."""


PANELS = (
    Panel("held-out score", ("val-core/",), markers=True),
    Panel("training score", ("critic/score/mean",)),
    Panel("entropy [nats]", ("actor/entropy", "actor/entropy_old")),
    Panel("KL [nats]", ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"), zeros=False),
    Panel("response length [tokens]", ("response_length/mean",)),
    Panel("gradient norm", ("actor/grad_norm", "critic/grad_norm")),
    Panel("sampler / trainer log-prob difference [nats]", ("training/rollout_log_prob_diff/max",)),
    Panel("throughput [tokens/s]", ("perf/throughput",)),
)

Series = dict[str, list[tuple[float, float]]]


def read_series(folder: Path) -> Series:
    """Every numeric metric of a run as (step, value) pairs in file order.

    Raises:
        DataError: when the folder has no metrics, or a line is not JSON (but for a last one that is being written).
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{path} does not exist: give the folder that a run printed as its outputs")
    series: Series = {}
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise DataError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict) or "step" not in row:
            raise DataError(f"{path}:{number} is no line of metrics: an object with step is expected")
        step = float(row["step"])
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "step":
                series.setdefault(name, []).append((step, float(value)))
    return series


def draw(runs: Mapping[str, Series], path: Path) -> Path:
    """Writes one picture with a panel per quantity that any run has; runs share panels.

    Raises:
        DataError: no run has anything to draw.
    """
    panels = [panel for panel in PANELS if any(_chosen(panel, series) for series in runs.values())]
    if not panels:
        raise DataError(f"{', '.join(runs)}: no step has been written yet")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(6 * columns, 3 * rows), squeeze=False)
    for place, panel in zip(axes.flat, panels, strict=False):
        _fill(place, panel, runs)
    for place in list(axes.flat)[len(panels) :]:
        place.set_visible(False)
    if len(runs) == 1:
        figure.suptitle(next(iter(runs)))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _fill(place: Axes, panel: Panel, runs: Mapping[str, Series]) -> None:
    """Draws a panel: a colour per run and a style per metric, or with a single run a colour per metric."""
    names = list(dict.fromkeys(name for series in runs.values() for name in _chosen(panel, series)))
    marker = "o" if panel.markers else None
    for number, series in enumerate(runs.values()):
        for kind, name in enumerate(names):
            if name in series:
                colour, style = (kind, 0) if len(runs) == 1 else (number, kind)
                steps, values = zip(*series[name], strict=True)
                line = place.plot(steps, values, linestyle=STYLES[style % len(STYLES)], marker=marker, markersize=4)
                line[0].set_color(f"C{colour % 10}")
    place.set_title(panel.title, fontsize=10)
    place.set_xlabel("step")
    place.grid(alpha=0.3)
    place.legend(handles=_legend(names, list(runs)), fontsize=7)


def _legend(names: Sequence[str], runs: Sequence[str]) -> list[Line2D]:
    """One entry per run and one per metric, not one per pair."""
    if len(runs) == 1:
        return [Line2D([], [], color=f"C{kind % 10}", label=name) for kind, name in enumerate(names)]
    by_metric = [
        Line2D([], [], color="grey", linestyle=STYLES[kind % len(STYLES)], label=name)
        for kind, name in enumerate(names)
    ]
    return [Line2D([], [], color=f"C{number % 10}", label=run) for number, run in enumerate(runs)] + by_metric


def _run_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or the whole of it where two end alike."""
    ends = [folder.resolve().name for folder in folders]
    return [str(folder) if ends.count(end) > 1 else end for folder, end in zip(folders, ends, strict=True)]


def _chosen(panel: Panel, series: Series) -> list[str]:
    """Metrics of the panel that the run has."""
    return [
        name
        for name, points in series.items()
        if (panel.zeros or any(value != 0 for _, value in points))
        and any(name == prefix or (prefix.endswith("/") and name.startswith(prefix)) for prefix in panel.prefixes)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws and says where the picture is; exit code 2 when a folder has no metrics."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridflow.report", description="Draws the curves of one or more runs."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="output folders of runs")
    parser.add_argument("--out", type=Path, help="picture to write; default: report.png in the first folder")
    parsed = parser.parse_args(arguments)
    try:
        names = _run_names(parsed.folders)
        runs = {name: read_series(folder) for name, folder in zip(names, parsed.folders, strict=True)}
        print(draw(runs, parsed.out or parsed.folders[0] / "report.png"))
    except (DataError, OSError, ValueError) as error:  # matplotlib: a folder or an ending that cannot be written
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
