"""What is wrong with a configuration, one entry per fault, so that a user reads all of them at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hybridflow.utils.errors import ConfigError

MAX_SHOWN = 12
"""Faults printed in full; a screen holds no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault of a configuration."""

    key: str
    """Dotted key."""
    text: str
    """What is wrong and what is allowed, without a final stop."""
    fix: str = ""
    """What to do, a whole sentence."""
    given: str | None = None
    """The value as the user would write it; None: the key itself is the fault."""
    reads: tuple[str, ...] = ()
    """Further keys that the judgement rests on; it is void when one of them is faulty itself."""

    def __str__(self) -> str:
        head = self.key if self.given is None else f"{self.key}={self.given}"
        return f"{head}: {self.text}." + (f" {self.fix}" if self.fix else "")

    def below(self, prefix: str) -> Problem:
        """The same fault seen from the root, where the component stands at ``prefix``."""
        return replace(self, key=join(prefix, self.key), reads=tuple(join(prefix, key) for key in self.reads))


class InvalidConfigError(ConfigError):
    """A ``ConfigError`` that knows its faults one by one."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"{len(self.problems)} problems in the configuration:"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems[:MAX_SHOWN], 1)]
        if len(self.problems) > MAX_SHOWN:
            lines.append(f"  ... and {len(self.problems) - MAX_SHOWN} more")
        return "\n".join(lines)


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raises InvalidConfigError when there are any."""
    found = tuple(problems)
    if found:
        raise InvalidConfigError(found)


def join(prefix: str, key: str) -> str:
    """``prefix.key``, or the one that is not empty."""
    return f"{prefix}.{key}" if prefix and key else prefix or key


def show(value: object) -> str:
    """``value`` as it would stand on the command line."""
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


def nearest(given: str, names: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The name most like ``given``, if any is like it."""
    lowered = {name.lower(): name for name in names}
    close = difflib.get_close_matches(given.lower(), list(lowered), n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def did_you_mean(given: str, names: Sequence[str]) -> str:
    """``Did you mean X?``, or nothing."""
    close = nearest(given, names)
    return f"Did you mean {close}?" if close else ""
