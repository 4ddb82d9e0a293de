"""One picture of the metrics of runs; the one home of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from hybridflow.cli.report import Series
from hybridflow.utils.errors import DataError

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


def _chosen(panel: Panel, series: Series) -> list[str]:
    """Metrics of the panel that the run has."""
    return [
        name
        for name, points in series.items()
        if (panel.zeros or any(value != 0 for _, value in points))
        and any(name == prefix or (prefix.endswith("/") and name.startswith(prefix)) for prefix in panel.prefixes)
    ]
