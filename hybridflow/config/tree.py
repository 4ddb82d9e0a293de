"""The configuration seen as a tree of dotted keys: its defaults, its leaves, and what the docstrings say about them."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from hybridflow.config.constraints import hints, is_union
from hybridflow.config.problems import join, show


def defaults_tree(kind: type) -> dict[str, Any]:
    """Every default of a configuration dataclass as plain nested dicts; interpolations are left as they are written."""
    return {field.name: _plain_default(field) for field in fields(kind)}


def _plain_default(field: Field[Any]) -> Any:
    if field.default_factory is MISSING:
        return list(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(field.default_factory, type) and is_dataclass(field.default_factory):
        return defaults_tree(field.default_factory)
    value = field.default_factory()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def value_at(tree: Any, key: str) -> Any:
    """What stands at a dotted key of a configuration or of plain nested dicts; None below a section that is None."""
    for name in key.split("."):
        if tree is None:
            return None
        tree = tree[name] if isinstance(tree, dict) else getattr(tree, name)
    return tree


def is_set(value: Any, default: Any) -> bool:
    """Whether a configuration's ``value`` is another than ``default`` of ``defaults_tree``; None is no value."""
    return value is not None and (list(value) if isinstance(value, tuple) else value) != default


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One key that can be set."""

    key: str
    type: str
    """Type in words."""
    allowed: str
    """Constraint in words, or nothing."""
    default: str
    doc: str
    """The docstring under the field."""
    open: bool
    """Whether any key may stand below it."""


def section_of(hint: Any) -> type | None:
    """The configuration dataclass that a field of this type holds (also ``... | None``), if any."""
    members = get_args(hint) if is_union(hint) else (hint,)
    return next((member for member in members if isinstance(member, type) and is_dataclass(member)), None)


def leaves(kind: type, prefix: str = "", defaults: Mapping[str, Any] | None = None) -> Iterator[Leaf]:
    """Every key below a configuration dataclass, in the order of the code."""
    tree = defaults_tree(kind) if defaults is None else defaults
    docs = docstrings(kind)
    for name, hint in hints(kind).items():
        key, section = join(prefix, name), section_of(hint)
        if section is not None:
            yield from leaves(section, key, tree[name])
            continue
        yield Leaf(
            key=key,
            type=describe(hint),
            allowed=allowed(hint),
            default=show(tree[name]),
            doc=docs.get(name, ""),
            open=is_open(hint),
        )


@cache
def leaf_names(kind: type) -> Mapping[str, bool]:
    """Dotted key of every leaf, and whether any key may stand below it; reads no source."""
    return dict(_walk_names(kind, ""))


def _walk_names(kind: type, prefix: str) -> Iterator[tuple[str, bool]]:
    for name, hint in hints(kind).items():
        key, section = join(prefix, name), section_of(hint)
        if section is not None:
            yield from _walk_names(section, key)
        else:
            yield key, is_open(hint)


def is_open(hint: Any) -> bool:
    """Whether a field of this type takes any key below it."""
    return get_origin(hint) is not None and issubclass_safe(get_origin(hint), Mapping)


def issubclass_safe(kind: Any, base: type) -> bool:
    """``issubclass`` that answers False for what is no class."""
    return isinstance(kind, type) and issubclass(kind, base)


def describe(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) is Annotated:
        return describe(get_args(hint)[0])
    if is_union(hint):
        return " or ".join(describe(member) for member in get_args(hint))
    if hint is type(None):
        return "null"
    if get_origin(hint) is tuple:
        members = get_args(hint)
        if members[-1] is Ellipsis:
            return f"list of {describe(members[0])}"
        return f"list of {len(members)} {describe(members[0])}s"
    if is_open(hint):
        return "mapping"
    names = {bool: "true or false", int: "integer", float: "number", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def allowed(hint: Any) -> str:
    """The constraints of a type in words; nothing when there are none."""
    if get_origin(hint) is Annotated:
        return "; ".join(constraint.allowed() for constraint in get_args(hint)[1:])
    found = [allowed(member) for member in get_args(hint) if member is not Ellipsis]
    return "; ".join(dict.fromkeys(text for text in found if text))


@cache
def docstrings_by_key(kind: type) -> Mapping[str, str]:
    """Docstring of every leaf by its dotted key."""
    return {leaf.key: leaf.doc for leaf in leaves(kind)}


@cache
def docstrings(kind: type) -> Mapping[str, str]:
    """Docstring under every field, inherited ones included; read from the source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            found |= _docstrings_of_module(base.__module__).get(base.__name__, {})
    return found


@cache
def _docstrings_of_module(module: str) -> dict[str, dict[str, str]]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return {}
    classes = [node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_field_docs(node)) for node in classes}


def _field_docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for before, after in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            yield before.target.id, " ".join(textwrap.dedent(after.value.value).split())
