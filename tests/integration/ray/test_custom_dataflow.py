"""The example of a user's own dataflow, run as a user runs it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "custom_dataflow" / "search.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["--ranks", "1"], ["--ranks", "2"], pytest.param(["--controller", "ray", "--ranks", "2"], marks=pytest.mark.ray)],
    ids=lambda arguments: " ".join(arguments),
)
def test_the_search_finds_the_top_on_any_controller(arguments: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(EXAMPLE.parents[2])
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"found x=(\S+) y=(\S+)", done.stdout)
    assert found, done.stdout
    # 25 rounds shrink the spread to 2 * 0.8^25 < 0.01, so the weighted mean is that close to the top
    assert [float(value) for value in found.groups()] == pytest.approx([3.0, -1.0], abs=0.02)


def test_the_dataflow_and_its_start_are_under_forty_lines() -> None:
    functions = [node for node in ast.parse(EXAMPLE.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert sum(node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno) < 40
