"""Every command answers a question for help before it imports anything heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hybridflow

ROOT = Path(hybridflow.__file__).parent
DOORS = sorted(file.stem for file in ROOT.glob("*.py") if file.stem != "__init__")
HEAVY = ("torch", "transformers", "vllm", "ray", "matplotlib")


def test_no_door_imports_anything_heavy_before_it_has_read_its_arguments():
    """One process for all doors: whoever comes first would be to blame, and the assertion names it."""
    code = (
        "import contextlib, importlib, io, sys\n"
        "sys.argv = ['door', '--help']\n"
        f"for door in {DOORS!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):\n"
        "        importlib.import_module(f'hybridflow.{door}').main()\n"
        "    assert 'usage: ' in said.getvalue(), door\n"
        f"    heavy = set({HEAVY!r}) & set(sys.modules)\n"
        "    assert not heavy, f'{door} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("door", ["replay", "reshard"])
def test_a_missing_argument_is_told_without_torch(door):
    code = f"import sys; sys.modules['torch'] = None; from hybridflow.{door} import main; main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT.parent)
    assert done.returncode == 2
    assert "the following arguments are required" in done.stderr
