"""From a plain dict tree to the frozen dataclasses, strictly: the only judge of what a user wrote.

Nothing is guessed: an unknown key, a wrong type, a name that does not exist and a size that cannot work are faults, and
all of them are reported together. A judgement that rests on a faulty key is left out, so that one slip is one message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

from hybridflow.config.constraints import hints, is_union
from hybridflow.config.keys import flatten, translate
from hybridflow.config.problems import InvalidConfigError, Problem, did_you_mean, join, nearest, raise_if_any, show
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import describe, is_open, leaf_names, section_of

T = TypeVar("T")
_BAD: Any = object()
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


def load_config(tree: Mapping[str, Any]) -> PPOConfig:
    """The configuration of ``main_ppo`` from nested dicts; what is absent has its default, verl's spellings are taken.

    Raises:
        ConfigError: for every fault at once: dotted key, what was given, what is allowed, what to do.
    """
    ours, problems, _ = translate(tree)
    return load_section(PPOConfig, ours, problems)


def load_section(kind: type[T], tree: Mapping[str, Any], known: list[Problem] | None = None) -> T:
    """A configuration dataclass from nested dicts; ``known`` faults are reported with those found here."""
    reader = _Reader(root=kind, problems=list(known or ()))
    config = reader.section(kind, tree, "")
    raise_if_any(reader.problems)
    return cast(T, config)


@dataclass(slots=True)
class _Reader:
    """One pass over a tree: converts and collects faults."""

    root: type
    problems: list[Problem] = field(default_factory=list)
    suspect: set[str] = field(default_factory=set)
    """Keys whose value in the result is not what the user meant."""

    def fault(self, key: str, text: str, fix: str = "", given: Any = _BAD) -> Any:
        """Records a fault and returns the mark of a value that could not be read."""
        shown = None if given is _BAD else show(given)
        self.problems.append(Problem(key=key, text=text, fix=fix, given=shown))
        self.suspect.add(key)
        return _BAD

    def section(self, kind: type, tree: Any, key: str) -> Any:
        """An instance of the dataclass ``kind``; fields that could not be read have their default."""
        if not isinstance(tree, Mapping):
            names = ", ".join(hints(kind))
            return self.fault(key, "is a section, not a value", f"Set one of its keys: {names}.", given=tree)
        fields = hints(kind)
        values = {}
        for name, value in tree.items():
            if name in fields:
                values[name] = self.convert(fields[name], value, join(key, name))
            else:
                self.unknown(kind, str(name), value, key)
        return self.build(kind, {name: value for name, value in values.items() if value is not _BAD}, key)

    def build(self, kind: type, values: dict[str, Any], key: str) -> Any:
        """``kind(**values)``, without the fields that its own checks refuse."""
        try:
            return kind(**values)
        except InvalidConfigError as error:
            faults = [fault.below(key) for fault in error.problems]
        faults = [fault for fault in faults if not self.rests_on_a_fault(fault)]
        self.problems += faults
        self.suspect |= {fault.key for fault in faults}
        if not key:
            return _BAD
        refused = {fault.key.removeprefix(f"{key}.").split(".")[0] for fault in faults} & set(values)
        return self.build(kind, {n: v for n, v in values.items() if n not in refused}, key) if refused else _BAD

    def rests_on_a_fault(self, fault: Problem) -> bool:
        """Whether a key that ``fault`` reads is faulty itself."""
        return any(
            read == bad or read.startswith(f"{bad}.") for read in (fault.key, *fault.reads) for bad in self.suspect
        )

    def unknown(self, kind: type, name: str, value: Any, at: str) -> None:
        """Records every leaf below a key that does not exist, with the nearest one that does."""
        leaves = flatten({name: value}) if isinstance(value, Mapping) and value else [((name,), value)]
        paths = [join(at, ".".join(path)) for path, _ in leaves]
        names = list(leaf_names(self.root))
        for path in paths[:3]:
            close = nearest_key(path, name, [join(at, field) for field in hints(kind)], names)
            siblings = ", ".join(hints(kind))
            fix = f"Did you mean {close}?" if close else f"Keys of {at or 'the root'}: {siblings}."
            self.fault(path, "no such key", fix)
            self.suspect |= {close} if close else set()

    def convert(self, hint: Any, value: Any, key: str) -> Any:
        """``value`` as the type ``hint`` wants it; constraints are judged by the dataclass that gets it."""
        if get_origin(hint) is Annotated:
            return self.convert(get_args(hint)[0], value, key)
        if is_union(hint):
            return self.union(get_args(hint), value, key)
        if section_of(hint) is not None:
            return self.section(hint, value, key)
        if get_origin(hint) is tuple:
            return self.sequence(hint, value, key)
        if is_open(hint):
            return self.mapping(get_args(hint)[1], value, key)
        if hint is Any:
            return value
        read = _SCALARS[hint](value)
        if read is _BAD:
            return self.fault(key, f"must be {_WANTED[hint]}", _type_advice(hint, value), given=value)
        if isinstance(read, str) and "${" in read and not read.startswith("outputs/${trainer."):
            return self.fault(key, "holds an unresolved interpolation", "Write the value itself.", given=value)
        return read

    def union(self, members: tuple[Any, ...], value: Any, key: str) -> Any:
        """The member that ``value`` already is, or else the first that can read it."""
        if value is None and type(None) in members:
            return None
        if value == "None" and type(None) in members:
            return self.fault(key, "'None' is a text here", "Write null for 'not set'.", given=value)
        wanted = [member for member in members if member is not type(None)]
        if len(wanted) == 1:
            return self.convert(wanted[0], value, key)
        exact = [m for m in wanted if _is_exactly(m, value)]
        for member in exact + sorted(wanted, key=lambda member: member is str):  # text reads anything, so it is last
            trial = _Reader(root=self.root)
            read = trial.convert(member, value, key)
            if not trial.problems:
                return read
        return self.fault(key, f"must be {' or '.join(describe(m) for m in members)}", given=value)

    def sequence(self, hint: Any, value: Any, key: str) -> Any:
        """A tuple; a single value stands for a list of one."""
        members = get_args(hint)
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if value is None or isinstance(value, Mapping):
            return self.fault(key, f"must be a {describe(hint)}", "Write [a,b] or a single value.", given=value)
        if members[-1] is not Ellipsis and len(items) != len(members):
            return self.fault(key, f"must be a {describe(hint)}", given=value)
        kinds = [members[0]] * len(items) if members[-1] is Ellipsis else list(members)
        read = [self.convert(kind, item, key) for kind, item in zip(kinds, items, strict=True)]
        return _BAD if any(item is _BAD for item in read) else tuple(read)

    def mapping(self, member: Any, value: Any, key: str) -> Any:
        """A dict with text keys."""
        if not isinstance(value, Mapping):
            return self.fault(key, "must be a mapping", f"Set {key}.NAME=VALUE.", given=value)
        read = {str(name): self.convert(member, item, join(key, str(name))) for name, item in value.items()}
        return {name: item for name, item in read.items() if item is not _BAD}


def nearest_key(path: str, name: str, siblings: list[str], names: list[str]) -> str | None:
    """The valid dotted key that ``path`` most likely meant: a sibling, the same name elsewhere, or the whole path."""
    tails = {key.rpartition(".")[2]: key for key in siblings}
    close = nearest(name, list(tails), cutoff=0.75)
    below = path.rpartition(f"{name}.")[2] if f"{name}." in path else ""
    if close is not None:
        return join(tails[close], below)
    last = path.rpartition(".")[2]
    same = [key for key in names if key.rpartition(".")[2] == last]
    if same:
        return nearest(path, same, cutoff=0.0)
    whole = nearest(path, names, cutoff=0.8)  # most of it may be the way there, so its end must be alike, too
    return whole if whole is not None and nearest(last, [whole.rpartition(".")[2]]) else None


def _bool(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    return _BAD


def _int(value: Any) -> Any:
    if isinstance(value, bool):
        return _BAD
    if isinstance(value, int):
        return value
    number = _float(value)
    return int(number) if number is not _BAD and number.is_integer() else _BAD


def _float(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return _BAD
    try:
        number = float(value)
    except ValueError:
        return _BAD
    return number if math.isfinite(number) else _BAD


def _str(value: Any) -> Any:
    """A text; ``~/`` at its beginning is the home folder, which the shell does not expand behind ``a.b=``."""
    if isinstance(value, str):
        return str(Path(value).expanduser()) if value.startswith("~/") else value or _BAD
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _BAD


_SCALARS = {bool: _bool, int: _int, float: _float, str: _str}
_WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def _is_exactly(hint: Any, value: Any) -> bool:
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    base = get_origin(base) or base
    return type(value) is base or (base is tuple and isinstance(value, list))


def _type_advice(hint: Any, value: Any) -> str:
    if value is None:
        return "Remove the key for its default."
    if isinstance(value, list) and len(value) == 1:
        return f"Write {show(value[0])}, without brackets."
    if value == "":
        return "It is empty: a variable of the shell may not be set. Write null for 'not set', where the key allows it."
    if isinstance(value, str) and value.lower() in ("none", "null"):
        return "Write null for 'not set', where the key allows it."
    if hint is int and isinstance(value, float):
        return f"Use {math.floor(value)} or {math.ceil(value)}." if math.isfinite(value) else ""
    if hint is bool:
        return did_you_mean(str(value), ("True", "False")) or "Write True or False."
    return ""
