"""Which values a field may hold, written in its type: ``lr: NonNegativeFloat``, ``name: Annotated[str, OneOf(NAMES)]``.

The same annotation is what the loader checks, what a dataclass checks when it is built in Python, and what the
generated reference prints.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hybridflow.config import choices
from hybridflow.config.problems import Problem, did_you_mean, raise_if_any, show


@dataclass(frozen=True, slots=True)
class Within:
    """A number between bounds (included unless ``above``/``below`` say otherwise), or one of ``also``."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` is allowed."""
        if value in self.also:
            return True
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def allowed(self) -> str:
        """What is allowed, in words."""
        also = "".join(f"{_plain(value)}, or " for value in self.also)
        lows = [f"at least {_plain(self.low)}"] if self.low is not None else []
        lows += [f"above {_plain(self.above)}"] if self.above is not None else []
        highs = [f"at most {_plain(self.high)}"] if self.high is not None else []
        highs += [f"below {_plain(self.below)}"] if self.below is not None else []
        return also + " and ".join(lows + highs)

    def fix(self, value: Any) -> str:
        """The nearest allowed number, as a suggestion."""
        bound = self.low if self.low is not None else self.above
        if bound is not None and value < bound and self.low is not None:
            return f"Use {_plain(self.low)} or more."
        if self.above is not None and value <= self.above:
            return f"Use more than {_plain(self.above)}."
        return f"Use {_plain(self.high)} or less." if self.high is not None and value > self.high else ""


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of the given names; ``open``: or a ``package.module:attribute``; ``several``: or more, with commas."""

    names: tuple[str, ...]
    open: bool = False
    several: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` is allowed."""
        if self.several:
            return all(name.strip() in self.names for name in str(value).split(","))
        return value in self.names or (self.open and is_dotted(value))

    def allowed(self) -> str:
        """What is allowed, in words."""
        few = "one or more, with commas between, of " if self.several else "one of "
        return few + ", ".join(self.names) + (", or your own package.module:attribute" if self.open else "")

    def fix(self, value: Any) -> str:
        """The nearest name."""
        wrong = (
            [name for name in str(value).split(",") if name.strip() not in self.names] if self.several else [str(value)]
        )
        return did_you_mean(wrong[0].strip(), self.names)


@dataclass(frozen=True, slots=True)
class Only:
    """A field kept for existing scripts that can have one value; ``because`` says what holds in its place."""

    value: Any
    because: str

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` is allowed."""
        return value == self.value

    def allowed(self) -> str:
        """What is allowed, in words."""
        return f"{show(self.value)}: {self.because}"

    def fix(self, value: Any) -> str:
        """What to do about another value."""
        return f"Remove the key or set it to {show(self.value)}."


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that every node sees as a path; ``elsewhere`` says which key takes a URL."""

    elsewhere: str = ""

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` is allowed."""
        return not is_url(value)

    def allowed(self) -> str:
        """What is allowed, in words."""
        return "a folder, no URL"

    def fix(self, value: Any) -> str:
        """Where a URL belongs."""
        return f"Give a folder that all nodes see{self.elsewhere}."


Constraint = Within | OneOf | Only | Folder

PositiveInt = Annotated[int, Within(low=1)]
NonNegativeInt = Annotated[int, Within(low=0)]
Seed = Annotated[int, Within(low=0, high=(1 << 32) - 1)]
"""What every library takes for a seed."""
CountOrAll = Annotated[int, Within(low=1, also=(-1,))]
"""A count of at least 1, or -1 where a docstring says what that means (none, all, off)."""
PositiveFloat = Annotated[float, Within(above=0)]
NonNegativeFloat = Annotated[float, Within(low=0)]
Share = Annotated[float, Within(low=0, high=1)]
Momentum = Annotated[float, Within(low=0, below=1)]
DType = Annotated[str, OneOf(choices.DTYPES)]


def _plain(number: float) -> str:
    """A bound as people write it: whole numbers with all their digits."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def is_dotted(value: Any) -> bool:
    """Whether ``value`` names a user's own object: ``package.module:attribute`` or ``package.module.attribute``."""
    return (
        isinstance(value, str)
        and all(part.isidentifier() for part in value.replace(":", ".").split("."))
        and (":" in value or "." in value)
    )


def is_url(value: Any) -> bool:
    """Whether ``value`` names a place of an fsspec file system (``s3://...``) rather than a path."""
    return isinstance(value, str) and "://" in value


class Section:
    """Base of every configuration dataclass: judges its own fields when it is built."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


@cache
def hints(kind: type) -> Mapping[str, Any]:
    """Field types of a configuration dataclass, constraints included."""
    found = get_type_hints(kind, include_extras=True)
    return {field.name: found[field.name] for field in fields(kind)}


def check_fields(section: Any, further: Iterable[Problem] = ()) -> None:
    """Raises InvalidConfigError for every field outside its constraint, and for ``further`` faults of the component.

    ``further`` is read only when the fields by themselves are right.
    """
    problems: list[Problem] = []
    for name, hint in hints(type(section)).items():
        problems += violations(hint, getattr(section, name), name)
    raise_if_any(problems or further)


def violations(hint: Any, value: Any, key: str) -> Iterator[Problem]:
    """Constraints of ``hint`` that ``value`` (already of the right type) does not meet."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *constraints = get_args(hint)
        for constraint in constraints:
            if not constraint.accepts(value):
                text = f"must be {constraint.allowed()}"
                yield Problem(key=key, given=show(value), text=text, fix=constraint.fix(value))
                return
        yield from violations(base, value, key)
    elif is_union(hint):
        if value is None:
            return
        for member in get_args(hint):
            if _holds(member, value):
                yield from violations(member, value, key)
                return
    elif origin is tuple and isinstance(value, tuple):
        members = get_args(hint)
        if len(members) == 2 and members[1] is Ellipsis:
            members = (members[0],) * len(value)
        for member, item in zip(members, value, strict=False):
            yield from violations(member, item, key)


def is_union(hint: Any) -> bool:
    """Whether ``hint`` is ``A | B``."""
    return get_origin(hint) in (Union, types.UnionType)


def _holds(hint: Any, value: Any) -> bool:
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    base = get_origin(base) or base
    if base is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(base, type) and isinstance(value, base)
