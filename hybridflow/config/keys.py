"""One answer for every key of verl: honoured (a leaf, another spelling, taken without effect) or refused with advice.

``translate`` is what the loader runs before it judges types; ``answer`` is the same knowledge for people and for
docs/reference/config_keys.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hybridflow.config.key_rules import RULES, Rule
from hybridflow.config.problems import Problem, show
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import defaults_tree, docstrings_by_key, leaf_names
from hybridflow.config.unread import is_unread

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What we say to one key."""

    honoured: bool
    text: str

    def __str__(self) -> str:
        return f"{'honoured' if self.honoured else 'refused'}: {self.text}"


def answer(key: str) -> Answer | None:
    """What happens to ``key``; None: we know nothing about it, and it is an error."""
    rule = rule_for(tuple(key.split(".")))
    if rule is not None:
        return Answer(honoured=rule.honoured, text=_rule_text(rule))
    leaf = _leaf_over(key)
    if leaf is None:
        return None
    text = docstrings_by_key(PPOConfig)[leaf] + (" (no effect yet)" if is_unread(leaf) else "")
    return Answer(honoured=True, text=text if leaf == key else f"handed on as part of {leaf}: {text}")


def rule_for(path: Path) -> Rule | None:
    """The first rule whose pattern fits."""
    return next((rule for rule in RULES if _fits(rule.pattern, path)), None)


def translate(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem], frozenset[str]]:
    """The tree in our own spelling, what was refused, and the keys that came in under another spelling.

    A value under an older spelling replaces the default of the new one; two different values for one key are a problem.
    """
    found: dict[Path, Any] = {}
    moved: dict[Path, tuple[str, Any]] = {}
    problems: list[Problem] = []
    flat = dict(flatten(tree))
    for path, value in flat.items():
        rule = rule_for(path)
        if rule is None:
            found[path] = value
        elif rule.to is not None:
            if value is not None:
                problems += _move(path, value, rule, moved)
        else:
            problems += _judge(path, value, rule, {**_defaults(), **flat})
    for path, (old, value) in moved.items():
        given = found.get(path)
        if path in found and given not in (value, _defaults().get(path)):
            problems.append(_two_values(old, value, ".".join(path), given))
        found[path] = value
    return nest(found), problems, frozenset(".".join(path) for path in moved)


def flatten(tree: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves of nested mappings with their paths; an empty mapping is a leaf."""
    for name, value in tree.items():
        path = (*prefix, str(name))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, path)
        else:
            yield path, value


def nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Nested dicts from paths; the inverse of ``flatten``."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        at = tree
        for name in path[:-1]:
            step = at.get(name)
            if not isinstance(step, dict):
                step = at[name] = {}
            at = step
        if not (isinstance(value, Mapping) and not value and isinstance(at.get(path[-1]), dict)):
            at[path[-1]] = value
    return tree


@cache
def _defaults() -> Mapping[Path, Any]:
    return dict(flatten(defaults_tree(PPOConfig)))


def _fits(pattern: str, path: Path) -> bool:
    parts = tuple(pattern.split("."))
    if parts[-1] == "**":
        parts = parts[:-1]
        if len(path) <= len(parts):
            return False
        path = path[: len(parts)]
    return len(parts) == len(path) and all(want in ("*", have) for want, have in zip(parts, path, strict=True))


def _move(path: Path, value: Any, rule: Rule, moved: dict[Path, tuple[str, Any]]) -> Iterator[Problem]:
    assert rule.to is not None
    target = tuple(rule.to.split("."))
    if target[-1] == "**":
        stem = len(rule.pattern.split(".")) - 1
        target = (*target[:-1], *path[stem:])
    old = ".".join(path)
    if target in moved and moved[target][1] != value:
        yield _two_values(old, value, *moved[target])
    moved[target] = (old, value)


def _judge(path: Path, value: Any, rule: Rule, flat: Mapping[Path, Any]) -> Iterator[Problem]:
    key = ".".join(path)
    if value is None or rule.values is None or value in rule.values:
        return
    if rule.same_as is not None:
        other = flat.get(tuple(rule.same_as.split(".")))
        if value != other:
            text = f"must equal {rule.same_as}={show(other)}"
            yield Problem(key=key, given=show(value), text=text, fix=_sentence(rule.text))
        return
    text = f"is not supported (only {' or '.join(show(v) for v in rule.values)})" if rule.values else "is not supported"
    yield Problem(key=key, given=show(value), text=text, fix=_sentence(rule.text))


def _two_values(old: str, value: Any, new: str, other: Any) -> Problem:
    text = f"means the same as {new}={show(other)}, with another value"
    return Problem(key=old, given=show(value), text=text, fix="Give one of the two.")


def _rule_text(rule: Rule) -> str:
    if rule.to is not None:
        return f"`{rule.to}` under another name"
    if rule.same_as is not None:
        return f"must equal `{rule.same_as}`"
    if rule.values is None:
        return f"any value, without effect: {rule.text}"
    if rule.values:
        return f"{' or '.join(f'`{show(value)}`' for value in rule.values)} without effect; else {rule.text}"
    return rule.text


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _leaf_over(key: str) -> str | None:
    names = leaf_names(PPOConfig)
    if key in names:
        return key
    parts = key.split(".")
    above = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((name for name in above if names.get(name)), None)
