"""The example of a user's own dataflow, run as a user runs it, and its length."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import ray

from hybridflow.single_controller.cluster import Cluster

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "custom_dataflow" / "search.py"


def check(printed: str) -> None:
    """25 rounds shrink the spread to 2 * 0.8^25 < 0.01, so the weighted mean is that close to the top."""
    found = re.search(r"found x=(\S+) y=(\S+)", printed)
    assert found, printed
    assert [float(value) for value in found.groups()] == pytest.approx([3.0, -1.0], abs=0.02)


def run(tmp_path: Path, *arguments: str, address: str = "") -> str:
    """What the command prints; ``address``: of a cluster that stands."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(EXAMPLE.parents[2]), **({"RAY_ADDRESS": address} if address else {})}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_the_search_finds_the_top_without_ray(ranks: str, tmp_path: Path) -> None:
    check(run(tmp_path, "local", ranks))


@pytest.mark.ray
@pytest.mark.slow
def test_the_search_finds_the_top_on_a_ray_of_its_own(tmp_path: Path) -> None:
    check(run(tmp_path, "ray", "2"))


@pytest.mark.ray
def test_the_search_finds_the_top_on_a_cluster_that_stands(cluster: Cluster, tmp_path: Path) -> None:
    check(run(tmp_path, "ray", "1", address=ray.get_runtime_context().gcs_address))


def test_two_roles_their_dataflow_and_their_start_are_under_forty_lines() -> None:
    text = EXAMPLE.read_text()
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in layout]
    told = {
        row for token in tokens if token.string.startswith('"""') for row in range(token.start[0], token.end[0] + 1)
    }
    lines = {row for token in tokens for row in range(token.start[0], token.end[0] + 1)} - told
    code = [row for row in lines if not re.match("import |from ", text.splitlines()[row - 1])]
    assert 20 < len(code) < 40
