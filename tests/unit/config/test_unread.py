from __future__ import annotations

import ast
from pathlib import Path

from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import leaf_names, leaves
from hybridflow.config.unread import is_unread, set_without_effect
from hybridflow.launch.preflight import plan_run
from tests.unit.config.trees import tree

PACKAGE = Path(__file__).parents[3] / "hybridflow"
ONE_VALUE = ("gradient_sync_order", "pipeline_model_parallel_size")
"""Keys with one allowed value: there is nothing to read."""


def attributes_read() -> set[str]:
    """Names of all attributes that the package reads outside the printing of plans."""
    files = [file for file in PACKAGE.rglob("*.py") if file.name not in ("memory.py", "show_plan.py")]
    files = [
        file for file in files if file.parent.name != "config" or file.name in ("checks.py", "root.py", "trainer.py")
    ]
    return {
        node.attr for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
    }


def test_every_key_has_a_reader_or_is_listed_as_without_effect():
    # By the last name of the key: coarse, but a key that nobody could read is found (known fault A06: dead options).
    read = attributes_read()
    kept = {leaf.key for leaf in leaves(PPOConfig) if leaf.doc.startswith("Kept for existing scripts")}
    names = set(leaf_names(PPOConfig)) - kept
    dead = {key for key in names if key.rpartition(".")[2] not in read and key.rpartition(".")[2] not in ONE_VALUE}
    assert {key for key in dead if not is_unread(key)} == set()


def test_a_key_without_effect_is_answered_with_a_note():
    config = load_config(tree("trainer.balance_batch=false", "critic.fsdp.param_offload=true"))
    assert list(set_without_effect(config)) == ["critic.fsdp.param_offload=True", "trainer.balance_batch=False"]
    assert any("trainer.balance_batch=False" in note for note in plan_run(config).notes)


def test_the_defaults_set_nothing_without_effect():
    assert list(set_without_effect(PPOConfig())) == []
