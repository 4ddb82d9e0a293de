from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hybridflow.config.keys import answer
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import leaf_names

REPO = Path(__file__).resolve().parents[3]
PAGES = sorted(
    {
        *REPO.glob("*.md"),
        *(REPO / "docs").rglob("*.md"),
        *(REPO / "examples").rglob("*.md"),
        *REPO.glob("benchmarks/*.md"),
    }
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
KEY = re.compile(
    r"(?<![\w./*-])((?:data|actor_rollout_ref|critic|reward|algorithm|trainer|profiler|ray_kwargs)(?:\.\w+)+)(?![\w/(])"
)
"""A dotted key in full; pages also write actor.x for actor_rollout_ref.actor.x, which is not looked at."""
COMMAND = re.compile(r"(?:python -m (hybridflow\.\w+))|(?:\bbash (scripts/\w+\.sh))")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_link_of_a_page_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in LINK.findall(text) if not target.startswith(("http", "#"))]
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_command_of_a_page_exists(page):
    commands = COMMAND.findall(page.read_text())
    files = [module.replace(".", "/") + ".py" if module else script for module, script in commands]
    assert not [file for file in files if not (REPO / file).is_file()]


def is_key(name: str) -> bool:
    """Whether a name is a key, a section, or the beginning of one that ends in a star or a placeholder."""
    if answer(name) is not None or name.endswith((".py", ".gz")):
        return True
    return any(leaf.startswith(name) for leaf in leaf_names(PPOConfig)) or name.startswith("trainer.pools.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_key_of_a_page_exists(page):
    if page.name in ("CHANGELOG.md", "config_keys.md") or page.parent.name == "design":
        return  # history, and keys that are refused
    assert sorted({key for key in KEY.findall(page.read_text()) if not is_key(key)}) == []


@pytest.mark.parametrize("picture", sorted((REPO / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_is_well_formed(picture):
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
