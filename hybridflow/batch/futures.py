"""``Pending`` and ``gather``: a call to a worker group returns at once, and this is the only wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

T = TypeVar("T", covariant=True)
A = TypeVar("A")
C = TypeVar("C")
D = TypeVar("D")


class Pending(Protocol[T]):
    """The result of a call that may still run."""

    def wait(self) -> T:
        """The result.

        Raises:
            WorkerError: a worker raised or died; names role, rank, node and method.
            DeadlineError: the call's deadline passed; names the ranks that did not answer.
        """
        ...

    @property
    def seconds(self) -> float:
        """How long the call ran on its slowest rank, without the time it queued; known after ``wait``."""
        ...


class Ready(Pending[T]):
    """A result that is already there."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        """The value."""
        return self._value

    @property
    def seconds(self) -> float:
        """0: it took no time to be there."""
        return 0.0


class Mapped(Pending[T]):
    """The result of another call, seen through a function."""

    __slots__ = ("_call", "_see")

    def __init__(self, call: Pending[Any], see: Callable[[Any], T]) -> None:
        self._call = call
        self._see = see

    def wait(self) -> T:
        """What ``see`` makes of the other call's result; raises as that call does."""
        return self._see(self._call.wait())

    @property
    def seconds(self) -> float:
        """The other call's."""
        return self._call.seconds


class Followed(Pending[T]):
    """The result of a call that is made with the result of another one, when it is waited for."""

    __slots__ = ("_call", "_next", "_then")

    def __init__(self, call: Pending[Any], then: Callable[[Any], Pending[T]]) -> None:
        self._call = call
        self._then = then
        self._next: Pending[T] | None = None

    def wait(self) -> T:
        """The second call's result; raises as either call does."""
        if self._next is None:
            self._next = self._then(self._call.wait())
        return self._next.wait()

    @property
    def seconds(self) -> float:
        """Of both calls."""
        return self._call.seconds + (0.0 if self._next is None else self._next.seconds)


@overload
def gather(a: Pending[A], /) -> A: ...
@overload
def gather(a: Pending[A], b: Pending[C], /) -> tuple[A, C]: ...
@overload
def gather(a: Pending[A], b: Pending[C], c: Pending[D], /) -> tuple[A, C, D]: ...
@overload
def gather(*pending: Pending[Any]) -> Any: ...
def gather(*pending: Pending[Any]) -> Any:
    """The results of all calls, in argument order; one call gives its bare result.

    The first failure propagates at once: the other calls are not waited for.
    """
    results = tuple(call.wait() for call in pending)
    return results[0] if len(results) == 1 else results
