"""What calls cost on one rank, as plain values that travel: in every step a little, in recorded steps everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """All executions of one operation in a call."""

    name: str
    calls: int
    seconds: float
    """On the CPU, without the operations that it called."""
    device_seconds: float
    """The same on the GPU."""
    peak_bytes: int
    """What it had allocated of the memory that was held at the call's peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProfile:
    """One call of one role on one rank."""

    role: str
    method: str
    rank: int
    seconds: float
    """Wall time, the recording included."""
    operations: tuple[OperationCost, ...]
    """The costliest first."""
    peak_bytes: int
    """Highest allocation above what was held at the start."""
    left_bytes: int
    """Allocation that outlives the call; below 0: the call has freed more than it took."""
    held_bytes: Mapping[str, Mapping[str, int]]
    """Tensors that every role of the process holds after the call, by role and kind."""
    files: tuple[str, ...]
    """Trace (and on a GPU allocator snapshot), relative to the folder of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """One call of one role on one rank, in any step."""

    role: str
    method: str
    seconds: float
    communication_seconds: float
    """Of these in collectives, the wait for slower ranks included."""
    peak_bytes: int
    """Highest memory of the rank: allocator (GPU), process (CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one rank of a generator did in a step."""

    tokens: float
    """Of responses; ranks that sample the same ones share them."""
    flops: float
    """Of the generator's matrices, shared likewise."""
    seconds: float
    peak_flops: float
    """FLOP/s that its device could reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What one rank did in a step."""

    calls: tuple[CallCost, ...]
    metrics: Mapping[str, float]
    """What roles have to say about their work; equal on all ranks."""
    generated: Generated | None = None
    """None: nothing."""
