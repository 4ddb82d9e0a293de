"""Keys that are accepted though nothing reads them yet; setting one is answered with a note, never with silence.

``tests/unit/config/test_unread.py`` finds every key without a reader and fails when it is not listed here. Whoever
makes a key work removes its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from hybridflow.config.problems import show
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import defaults_tree, leaf_names

NOT_READ_YET = ("*.mixed_precision.buffer_dtype",)
"""Patterns of dotted keys; ``*`` stands for anything."""


def is_unread(key: str) -> bool:
    """Whether nothing reads ``key`` yet."""
    return any(fnmatchcase(key, pattern) for pattern in NOT_READ_YET)


def set_without_effect(config: PPOConfig) -> Iterator[str]:
    """``key=value`` of every unread key that differs from its default."""
    defaults = defaults_tree(PPOConfig)
    for key in leaf_names(PPOConfig):
        if not is_unread(key):
            continue
        value, default = _at(config, key), _at(defaults, key)
        if value is not None and _plain(value) != default:
            yield f"{key}={show(value)}"


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        if tree is None:
            return None
        tree = tree[name] if isinstance(tree, dict) else getattr(tree, name)
    return tree


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
