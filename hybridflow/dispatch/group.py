"""What a worker group is, whoever runs it: Ray actors, local processes, or this process.

A group hosts one or more *roles* on the same processes (colocation): every process constructs ``spec.target`` once per
role, as ``Class(context, **spec.kwargs)``, in the order of the specs; later workers find the earlier ones of their
process in ``context.siblings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridflow.batch.futures import Pending
from hybridflow.topology.parallel import ParallelDims


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One role of a group."""

    role: str
    """Name used in calls and errors: actor, critic, reference, reward, or the user's own."""
    target: str
    """``module:Class`` of the worker, or a dotted path of the user's own."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments; picklable."""
    layouts: Mapping[str, ParallelDims] = field(default_factory=dict)
    """Layout by mesh name (``Registration.mesh``); a mesh that is not named has dp = world."""


@dataclass(slots=True, kw_only=True)
class RankContext:
    """What a worker knows about where it runs. torch.distributed's world is initialised before it is built."""

    rank: int
    world: int
    local_rank: int
    """Position among the ranks of this node."""
    node: str
    """Host name or node id, for errors."""
    device: str
    """``cpu`` or ``cuda:i``."""
    threads: int
    """Threads this process may use."""
    siblings: dict[str, Any] = field(default_factory=dict)
    """Workers of this process by role."""


class WorkerGroup(Protocol):
    """Processes that host the same roles on every rank."""

    @property
    def world(self) -> int:
        """Ranks."""
        ...

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Calls a registered method on the ranks that its transfer protocol names; returns at once.

        Calls to one group run in submission order. Batch arguments are split (and padded, and un-padded on collect) by
        the protocol; other arguments go to every rank as they are.
        """
        ...

    def bytes_moved(self) -> int:
        """Payload bytes that went through the driver since the last call of this method."""
        ...

    def shutdown(self) -> None:
        """Ends every process of the group and frees what it held; may be called twice."""
        ...
