"""``scripts/install.sh`` up to the point where pip takes over: what it leaves behind when a Python lacks something."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "scripts" / "install.sh"
PYTHON = """\
#!/usr/bin/env bash
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit {venv} ;;
  "-m pip" | "-m ensurepip") exit {pip} ;;
esac
"""


def install(folder: Path, *, venv: int, pip: int) -> subprocess.CompletedProcess[str]:
    """A run with a Python whose ``-m venv`` and ``-m pip`` end so."""
    python = folder / "python"
    python.write_text(PYTHON.format(venv=venv, pip=pip))
    python.chmod(0o755)
    environment = {**os.environ, "HYBRIDFLOW_VENV": str(folder / "venv")}
    command = ["bash", str(INSTALL), "--extra", "cpu", "--python", str(python)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_half_an_environment_is_not_taken_for_a_whole_one(tmp_path):
    done = install(tmp_path, venv=1, pip=0)
    assert done.returncode == 1 and "apt-get install python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_environment_without_pip_is_told(tmp_path):
    done = install(tmp_path, venv=0, pip=1)
    assert done.returncode == 1 and "has no pip" in done.stderr


@pytest.mark.parametrize(("words", "said"), [(["--extra", "cuda"], "no extra 'cuda'"), (["--exrta"], "unknown option")])
def test_a_wrong_option_is_told_before_anything_is_made(tmp_path, words, said):
    environment = {**os.environ, "HYBRIDFLOW_VENV": str(tmp_path / "venv")}
    done = subprocess.run(["bash", str(INSTALL), *words], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and said in done.stderr
    assert not (tmp_path / "venv").exists()
