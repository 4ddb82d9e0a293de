from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.config.choices import ADV_ESTIMATORS, POLICY_LOSSES
from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import leaves

DOCS = Path(__file__).parents[3] / "docs" / "algorithms"
PAGES = [("advantages", name) for name in ADV_ESTIMATORS] + [("losses", name) for name in POLICY_LOSSES]
SECTIONS = ("Formula", "Source", "When to use it", "Configuration", "Traps")


def tree(lines: list[str]) -> dict[str, Any]:
    """``a.b=1`` lines as nested dicts."""
    found: dict[str, Any] = {}
    for line in lines:
        key, _, value = line.partition("=")
        *path, leaf = key.split(".")
        node = found
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = yaml.safe_load(value)
    return found


@pytest.mark.parametrize(("kind", "name"), PAGES)
def test_every_name_has_a_page_whose_configuration_loads(kind: str, name: str) -> None:
    text = (DOCS / kind / f"{name}.md").read_text()
    assert text.startswith(f"# {name}: ")
    for section in SECTIONS:
        assert f"\n## {section}\n" in text
    block = text.split("## Configuration")[1].split("```")[1].splitlines()[1:]
    config = load_config(tree([line for line in block if line]))
    chosen = {
        "advantages": config.algorithm.adv_estimator,
        "losses": config.actor_rollout_ref.actor.policy_loss.loss_mode,
    }
    assert chosen[kind] == name
    assert f"({kind}/{name}.md)" in (DOCS / "index.md").read_text()


GENERAL = sorted(path.name for path in DOCS.glob("*.md"))
INLINE = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+|[a-z_]+(?:\.[a-z_]+)*=[^`|]+)`")
FIRST = ("algorithm", "actor_rollout_ref", "actor", "critic", "data", "reward", "rollout", "trainer")
COMMAND = re.compile(r"hybridflow\.main_ppo((?:\s|\\\n|[\w.\[\]]+=[^\s`]+)+)")


@pytest.mark.parametrize("page", GENERAL)
def test_keys_that_a_page_names_exist_and_its_commands_load(page: str) -> None:
    """A key may be written without its first parts (``actor.clip_ratio``); then some key must end in it."""
    text, keys = (DOCS / page).read_text(), [leaf.key for leaf in leaves(PPOConfig)]
    for span in INLINE.findall(text):
        name, given, _ = span.partition("=")
        if given or name.split(".")[0] in FIRST:
            parents = {key.rsplit(".", depth)[0] for key in keys for depth in range(key.count(".") + 1)}
            assert any(f".{key}".endswith(f".{name}") for key in parents), f"{page}: no key ends in {name}"
    for command in COMMAND.findall(text):
        load_config(tree(command.replace("\\\n", " ").split()))


def test_a_key_that_does_not_exist_would_be_seen() -> None:
    (span,) = INLINE.findall("set `algorithm.gama=1.0` and not `x_t`")
    assert not any(leaf.key.endswith(span.partition("=")[0]) for leaf in leaves(PPOConfig))


def test_no_page_stands_for_a_name_that_does_not_exist() -> None:
    pages = {(path.parent.name, path.stem) for path in DOCS.glob("*/*.md")}
    assert pages == set(PAGES)
