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
JUDGES = ("memory.py", "show_plan.py", "findings.py", "data_findings.py", "doctor.py")
"""Files that read a key to judge or to print it; that does not make it work."""
JUDGED_ONLY = frozenset(
    {
        "actor_rollout_ref.actor.gradient_sync_order",  # one value
        "critic.gradient_sync_order",
        "actor_rollout_ref.rollout.pipeline_model_parallel_size",  # one value
        "actor_rollout_ref.rollout.data_parallel_size",  # follows from the devices; a given value is compared
        "trainer.max_critic_ckpt_to_keep",  # must equal the actor's
        "trainer.total_training_steps",  # read by config/checks.py: planned_steps
    }
)


def attributes_read() -> set[str]:
    """Names of all attributes that the package reads outside the printing of plans."""
    files = [file for file in PACKAGE.rglob("*.py") if file.name not in JUDGES]
    files = [file for file in files if file.parent.name != "config" or file.name in ("root.py", "trainer.py")]
    return {
        node.attr for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
    }


def test_every_key_has_a_reader_or_is_listed_as_without_effect():
    # By the last name of the key: coarse, but a key that nobody could read is found (known fault A06: dead options).
    read = attributes_read()
    kept = {leaf.key for leaf in leaves(PPOConfig) if leaf.doc.startswith("Kept for existing scripts")}
    names = set(leaf_names(PPOConfig)) - kept - JUDGED_ONLY
    dead = {key for key in names if key.rpartition(".")[2] not in read}
    assert {key for key in dead if not is_unread(key)} == set()


def test_a_key_that_is_read_by_now_is_no_longer_listed():
    read = attributes_read()
    alive = {key for key in leaf_names(PPOConfig) if is_unread(key) and key.rpartition(".")[2] in read}
    assert alive == set(), "these have a reader now: take them out of hybridflow/config/unread.py"


def test_a_key_without_effect_is_answered_with_a_note():
    config = load_config(tree("critic.fsdp.mixed_precision.buffer_dtype=bf16"))
    assert list(set_without_effect(config)) == ["critic.fsdp.mixed_precision.buffer_dtype=bf16"]
    assert any("critic.fsdp.mixed_precision.buffer_dtype=bf16" in note for note in plan_run(config).notes)


def test_the_defaults_set_nothing_without_effect():
    assert list(set_without_effect(PPOConfig())) == []
