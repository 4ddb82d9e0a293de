"""Curves of one or more runs, drawn from their ``metrics.jsonl``: where people would rather look than read."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridflow.utils.errors import DataError
from hybridflow.utils.optional import load

METRICS_FILE = "metrics.jsonl"
DRAW = "hybridflow.cli.curves:draw"
"""Imports matplotlib, which a question for help should not wait for."""

Series = dict[str, list[tuple[float, float]]]
"""(step, value) pairs by metric."""


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


def _run_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or the whole of it where two end alike."""
    ends = [folder.resolve().name for folder in folders]
    return [str(folder) if ends.count(end) > 1 else end for folder, end in zip(folders, ends, strict=True)]


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
        if importlib.util.find_spec("matplotlib") is None:
            raise DataError("package matplotlib is not installed: install hybridflow[trackers], or read metrics.jsonl")
        print(load(DRAW)(runs, parsed.out or parsed.folders[0] / "report.png"))
    except (DataError, OSError, ValueError) as error:  # matplotlib: a folder or an ending that cannot be written
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
