"""The parts of the floor plan that import-linter cannot say: subpackages of other projects, and dynamic imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CODE = Path(__file__).resolve().parents[2] / "hybridflow"
NO_COLLECTIVES = ("algorithms", "topology", "hybrid_engine/plan.py", "trainer")
DYNAMIC_IMPORT_HOME = CODE / "utils" / "optional.py"


def modules(where: str = "") -> list[Path]:
    root = CODE / where
    return [root] if root.is_file() else sorted(root.rglob("*.py"))


def names_used(source: str) -> set[str]:
    """Dotted names that are imported or written as attribute chains."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found


def offenders(paths: list[Path], *forbidden: str) -> list[str]:
    found = []
    for path in paths:
        used = names_used(path.read_text())
        hits = [f for f in forbidden if any(name == f or name.startswith(f + ".") for name in used)]
        found += [f"{path.relative_to(CODE.parent)}: {hit}" for hit in hits]
    return found


@pytest.mark.parametrize("where", NO_COLLECTIVES)
def test_algorithms_plans_and_the_trainer_know_no_collectives(where):
    paths = modules(where)
    assert paths
    assert not offenders(paths, "torch.distributed")


def test_the_only_dynamic_import_is_utils_optional():
    elsewhere = [path for path in modules() if path != DYNAMIC_IMPORT_HOME]
    assert not offenders(elsewhere, "importlib.import_module", "importlib.util.module_from_spec", "__import__")
    assert offenders([DYNAMIC_IMPORT_HOME], "importlib.import_module")


@pytest.mark.parametrize(
    "source",
    ["import torch.distributed as dist", "from torch import distributed", "from torch.distributed.fsdp import x",
     "import torch\ntorch.distributed.barrier()"],
)  # fmt: skip
def test_each_way_to_name_a_subpackage_is_seen(source):
    assert any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in names_used(source))
