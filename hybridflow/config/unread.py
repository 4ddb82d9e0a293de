"""Keys that are accepted though nothing reads them yet; setting one is answered with a note, never with silence.

``tests/unit/config/test_unread.py`` finds every key without a reader and fails when it is not listed here. Whoever
makes a key work removes its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from hybridflow.config.problems import show
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import defaults_tree, is_set, leaf_names, value_at

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
        value = value_at(config, key)
        if is_set(value, value_at(defaults, key)):
            yield f"{key}={show(value)}"
