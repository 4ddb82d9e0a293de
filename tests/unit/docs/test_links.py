from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("picture", sorted((REPO / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_is_well_formed(picture):
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
