"""From ``call(role, method, ...)`` to arguments per rank and back: the driver's half of a call, without processes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.batch.batch import Batch
from hybridflow.dispatch.group import WorkerSpec
from hybridflow.dispatch.register import Columns, Registration, registrations
from hybridflow.dispatch.transfer import Arguments, Transfer, check_writes, protocol, row_count, select_reads
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ColumnError, ConfigError, EngineError
from hybridflow.utils.optional import load


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """One call, ready to be sent."""

    role: str
    method: str
    shares: Sequence[Arguments | None]
    """Arguments by rank; None: not called. Ranks that get the same rows share one object."""
    wanted: frozenset[int]
    """Ranks whose results travel."""
    blocking: bool
    layout: ParallelDims
    transfer: Transfer
    rows: int | None
    writes: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that are called."""
        return tuple(rank for rank, share in enumerate(self.shares) if share is not None)

    def collect(self, values: Mapping[int, Any]) -> Any:
        """The caller's result from the results by rank.

        Raises:
            ColumnError: a promised column is missing, or a rank returned another number of rows.
            EngineError: results that the protocol cannot join.
        """
        try:
            result = self.transfer.collect(self.layout, [values.get(r) for r in range(self.layout.world)], self.rows)
            check_writes(result, self.writes)
        except (ColumnError, EngineError) as error:
            raise type(error)(f"{self.role}.{self.method}: {error}") from error
        return result


@dataclass(frozen=True, slots=True)
class _Role:
    spec: WorkerSpec
    methods: Mapping[str, Registration]
    reads: Mapping[str, Columns | None]
    """Columns that travel, by method."""


class CallTable:
    """What can be called on a group.

    Raises:
        ConfigError: two specs of one role, a target that cannot be imported or has no registered method, a protocol
            that does not exist, a layout that does not fill the group.
    """

    def __init__(self, specs: Sequence[WorkerSpec], world: int) -> None:
        if not specs:
            raise ConfigError("a worker group needs at least one role")
        self._world = world
        self._roles: dict[str, _Role] = {}
        for spec in specs:
            if spec.role in self._roles:
                raise ConfigError(f"role {spec.role!r} appears twice in one worker group")
            methods = registrations(load(spec.target))
            if not methods:
                raise ConfigError(f"{spec.target!r} has no method with @register: nothing of it can be called")
            for registration in methods.values():
                protocol(registration.dispatch)
            for mesh, layout in spec.layouts.items():
                if layout.world != world:
                    raise ConfigError(
                        f"layout {mesh!r} of role {spec.role!r} is made for {layout.world} ranks, the group has {world}"
                    )
            reads = {name: registration.columns(spec.kwargs) for name, registration in methods.items()}
            self._roles[spec.role] = _Role(spec, methods, reads)

    @property
    def roles(self) -> tuple[str, ...]:
        """Role names, in the order in which they are built."""
        return tuple(self._roles)

    def prepare(self, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PreparedCall:
        """The call, split over the ranks.

        Raises:
            ConfigError: no such role or method; names the nearest.
            ColumnError: a column that the method reads is missing, or row counts differ.
            TypeError: an argument is a ``Pending``.
        """
        if role not in self._roles:
            raise ConfigError(f"this group has no role {role!r}{_nearest(role, self._roles)}")
        methods = self._roles[role].methods
        if method not in methods:
            raise ConfigError(f"role {role!r} has no registered method {method!r}{_nearest(method, methods)}")
        for value in (*args, *kwargs.values()):
            if not isinstance(value, type) and callable(getattr(value, "wait", None)) and not isinstance(value, Batch):
                raise TypeError(f"{role}.{method}: an argument is a pending call; pass its .wait() or gather it first")
        registration = methods[method]
        layout = self._roles[role].spec.layouts.get(registration.mesh, ParallelDims(dp_shard=self._world))
        transfer = protocol(registration.dispatch)
        try:
            arguments = select_reads(Arguments(args, dict(kwargs)), self._roles[role].reads[method])
            rows = row_count(arguments)
            shares = transfer.distribute(layout, arguments)
        except (ColumnError, EngineError) as error:
            raise type(error)(f"{role}.{method}: {error}") from error
        answering = range(self._world) if transfer.answering is None else transfer.answering(layout)
        called = {rank for rank, share in enumerate(shares) if share is not None}
        return PreparedCall(
            role=role,
            method=method,
            shares=shares,
            wanted=frozenset(answering) & called,
            blocking=registration.blocking,
            layout=layout,
            transfer=transfer,
            rows=rows,
            writes=registration.writes,
        )


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f" (there are {', '.join(known)}){hint}"
