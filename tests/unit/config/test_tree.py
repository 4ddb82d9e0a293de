from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Annotated

import pytest

from hybridflow.config.constraints import OneOf, Within, hints
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import allowed, defaults_tree, describe, leaf_names, leaves, section_of


def sections(kind: type = PPOConfig) -> list[type]:
    below = [section_of(hint) for hint in hints(kind).values()]
    return [kind, *(found for section in below if section is not None for found in sections(section))]


@pytest.mark.parametrize("section", sorted(set(sections()), key=lambda s: s.__name__))
def test_every_section_is_frozen_keyword_only_and_slotted(section):
    assert is_dataclass(section)
    assert section.__dataclass_params__.frozen
    assert all(field.kw_only for field in fields(section))
    assert "__dict__" not in dir(section())


def test_every_leaf_has_a_docstring():
    assert [leaf.key for leaf in leaves(PPOConfig) if not leaf.doc] == []


def test_names_and_leaves_agree():
    assert [leaf.key for leaf in leaves(PPOConfig)] == list(leaf_names(PPOConfig))


def test_defaults_keep_interpolations_for_hydra():
    assert defaults_tree(PPOConfig)["trainer"]["default_local_dir"].startswith("outputs/${trainer.project_name}")


def test_defaults_of_a_factory_that_differs_from_the_class_are_kept():
    assert defaults_tree(PPOConfig)["critic"]["optim"]["lr"] == 1e-5
    assert defaults_tree(PPOConfig)["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-6


@pytest.mark.parametrize(
    ("hint", "words", "limits"),
    [
        (int, "integer", ""),
        (Annotated[int, Within(low=1)], "integer", "at least 1"),
        (Annotated[float, Within(above=0, high=1)] | None, "number or null", "above 0 and at most 1"),
        (tuple[str, ...], "list of text", ""),
        (tuple[Annotated[str, OneOf(("a", "b"))], ...], "list of text", "one of a, b"),
        (Annotated[int, Within(low=1, also=(-1,))], "integer", "-1, or at least 1"),
    ],
)
def test_types_read_as_words(hint, words, limits):
    assert describe(hint) == words
    assert allowed(hint) == limits
