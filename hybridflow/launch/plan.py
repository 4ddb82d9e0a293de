"""The resolved plan of a run: every size once, with its unit; who runs where; what travels. Frozen, torch-free.

Whoever needs a size reads it here. Nothing is written back to the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybridflow.launch.hf_model import ModelFacts
from hybridflow.topology.parallel import ParallelDims
from hybridflow.topology.resources import Pool

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroPlan:
    """How the rows of one data-parallel coordinate are cut for one call."""

    role: str
    call: str
    max_tokens: int | None
    """Tokens of a micro-batch (per device x sp); None: cut by rows."""
    max_rows: int | None
    """Sequences of a micro-batch; None: cut by tokens."""
    rows_per_coordinate: int
    """Sequences that one data-parallel coordinate gets in one call (or mini-batch), rounded up."""

    def __str__(self) -> str:
        return f"{self.max_tokens} tokens" if self.max_tokens is not None else f"{self.max_rows} sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """Optimizer steps of one role in one trainer step."""

    role: str
    mini_batch_prompts: int
    """Prompts per optimizer step, global."""
    mini_batch_sequences: int
    """The same in sequences."""
    mini_batches: int
    """Per epoch."""
    epochs: int

    @property
    def optimizer_steps(self) -> int:
        """Per trainer step."""
        return self.mini_batches * self.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Every batch size of the run, each in one unit."""

    prompts: int
    """P: prompts per trainer step."""
    samples_per_prompt: int
    """G."""
    prompts_per_round: int
    """Prompts per round of dynamic sampling; P without it."""
    validation_prompts: int | None
    """Prompts per validation round; None: all at once."""
    validation_samples_per_prompt: int
    prompt_length: int
    """Tokens at most."""
    response_length: int
    """Tokens at most."""
    model_length: int
    """Tokens of context that the generator keeps."""
    updates: tuple[UpdatePlan, ...]
    """actor, and critic where there is one."""
    micro: tuple[MicroPlan, ...]
    epochs: int
    """Passes over the training prompts."""
    total_steps: int | None
    """Trainer steps; None: the number of rows in the data files decides."""

    @property
    def sequences(self) -> int:
        """B = P x G: sequences per trainer step."""
        return self.prompts * self.samples_per_prompt

    def steps(self, rows: int) -> int:
        """Trainer steps of the run over ``rows`` training prompts."""
        return self.total_steps if self.total_steps is not None else rows // self.prompts * self.epochs

    def update(self, role: str) -> UpdatePlan:
        """Optimizer steps of ``role``."""
        return next(update for update in self.updates if update.role == role)

    def micro_batches(self, role: str, call: str) -> MicroPlan:
        """Micro-batches of one call."""
        return next(micro for micro in self.micro if (micro.role, micro.call) == (role, call))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool with what its processes need."""

    pool: Pool
    device: Device
    threads: int
    """Threads of one process."""
    environment: Mapping[str, str]
    """Variables that must be set before its processes import anything."""
    unset: tuple[str, ...] = ()
    """Variables that must not be set there."""
    replicas: int = 1
    """Groups of processes of its own, equal and in rank order: a generator that lives alone dies replica by replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Where one role lives and how it is laid out."""

    role: str
    pool: str
    mesh: str
    """Name of the layout in ``@register``: train or rollout."""
    dims: ParallelDims
    """A role without a mesh has dp = world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One call of the dataflow."""

    stage: str
    role: str
    method: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Estimate for one role on one device, in bytes by what it is for."""

    role: str
    pool: str
    resident: Mapping[str, int]
    """Held all the time, or moved to host memory while the role is idle where offload is on."""
    phases: Mapping[str, Mapping[str, int]]
    """Held only during a call, at its worst moment: by name of the call."""

    @property
    def peak(self) -> Mapping[str, int]:
        """The phase that takes most."""
        return max(self.phases.values(), key=lambda parts: sum(parts.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What this machine has or lacks for a plan."""

    level: Literal["ok", "warning", "error"]
    what: str
    """Dotted key that asks for it."""
    text: str
    fix: str = ""
    """What to do, a whole sentence; empty when there is no problem."""

    def __str__(self) -> str:
        return f"{self.what}: {self.text}." + (f" {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """All that is decided before the first process starts."""

    device: Device
    batch: BatchPlan
    pools: tuple[PoolPlan, ...]
    roles: tuple[RolePlan, ...]
    dataflow: tuple[Stage, ...]
    model: ModelFacts | None
    """None: the model is not on this machine."""
    memory: tuple[MemoryLine, ...]
    """Empty when the model is not known."""
    notes: tuple[str, ...] = ()
    """What a user may not expect."""

    def role(self, name: str) -> RolePlan:
        """The plan of one role; KeyError when it is not part of the dataflow."""
        for role in self.roles:
            if role.role == name:
                return role
        raise KeyError(name)

    def pool(self, name: str) -> PoolPlan:
        """The plan of one pool; KeyError when there is none."""
        for pool in self.pools:
            if pool.pool.name == name:
                return pool
        raise KeyError(name)

    def memory_per_device(self, pool: str) -> int:
        """Bytes on one device of ``pool``: everything resident, and the highest peak (roles of a pool take turns)."""
        lines = [line for line in self.memory if line.pool == pool]
        return sum(sum(line.resident.values()) for line in lines) + max(
            (sum(line.peak.values()) for line in lines), default=0
        )
