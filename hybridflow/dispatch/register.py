"""``@register``: a worker method names its transfer protocol and its columns; nothing else is remote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hybridflow.dispatch.transfer import Transfer

F = TypeVar("F", bound=Callable[..., Any])
Columns = tuple[str, ...]
Reads = Columns | Callable[[Mapping[str, Any]], Columns | None] | None
"""Names of columns; or a function that says them from the worker's constructor arguments; None: all columns."""
_MARK = "_hybridflow_registration"


@dataclass(frozen=True, slots=True)
class Registration:
    """What ``@register`` recorded about a method."""

    dispatch: str | Transfer
    """Name of a transfer protocol (dispatch/transfer.py: PROTOCOLS), or the user's own pair."""
    reads: Reads = None
    """Columns of its Batch arguments that travel; None: all. ``"name?"`` travels when it is there; ``valid`` always."""
    writes: tuple[str, ...] = ()
    """Columns of the Batch that it returns; checked on collect when given. ``"name?"`` may be absent."""
    blocking: bool = False
    """Whether a call waits before it returns."""
    mesh: str = "train"
    """Which of the worker's layouts splits the rows: train, rollout, ref."""

    def columns(self, arguments: Mapping[str, Any]) -> Columns | None:
        """``reads`` for a worker with these constructor arguments."""
        return self.reads(arguments) if callable(self.reads) else self.reads


def register(
    *,
    dispatch: str | Transfer,
    reads: Reads = None,
    writes: tuple[str, ...] = (),
    blocking: bool = False,
    mesh: str = "train",
) -> Callable[[F], F]:
    """Marks a worker method as callable on its whole group, by a transfer protocol."""

    def mark(method: F) -> F:
        mark = Registration(dispatch=dispatch, reads=reads, writes=writes, blocking=blocking, mesh=mesh)
        setattr(method, _MARK, mark)
        return method

    return mark


def registrations(worker: type) -> dict[str, Registration]:
    """Registered methods of a worker class, inherited ones included."""
    found = {}
    for name in dir(worker):
        mark = getattr(getattr(worker, name), _MARK, None)
        if mark is not None:
            found[name] = mark
    return found
