"""Configuration trees for tests, written as on the command line."""

from __future__ import annotations

from typing import Any

import yaml


def tree(*overrides: str) -> dict[str, Any]:
    """Nested dicts from ``key=value`` texts; values are YAML."""
    found: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        *above, last = key.split(".")
        at = found
        for name in above:
            at = at.setdefault(name, {})
        at[last] = yaml.safe_load(value)
    return found
