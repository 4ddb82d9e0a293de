"""Which steps the profiler records and what it keeps (``profiler.*``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from hybridflow.config.choices import PROFILED_CONTENTS, PROFILED_ROLES
from hybridflow.config.constraints import NonNegativeInt, OneOf, PositiveInt, Section, check_fields
from hybridflow.config.problems import Problem, show


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilerConfig(Section):
    """torch's profiler around every call of chosen roles, in chosen steps."""

    steps: tuple[PositiveInt, ...] = ()
    """Trainer steps that are recorded; none: nothing is."""
    roles: tuple[Annotated[str, OneOf(PROFILED_ROLES)], ...] = PROFILED_ROLES
    """Roles that are recorded."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Ranks (of each pool) that are recorded."""
    all_ranks: bool = False
    """Whether every rank is recorded; ``ranks`` is then not read."""
    contents: tuple[Annotated[str, OneOf(PROFILED_CONTENTS)], ...] = ("cpu", "cuda", "memory")
    """Of: cpu, cuda (kernels, where there is a GPU), memory (allocations), shapes, stack."""
    save_path: str | None = None
    """Folder of ``step_N/``; None: ``profile`` in the run's folder."""
    end_run: bool = False
    """Whether the run ends behind the last recorded step (``python -m hybridflow.profile`` sets it)."""
    top: PositiveInt = 5
    """Operations printed for every call."""

    def __post_init__(self) -> None:
        check_fields(self, self._faults())

    def _faults(self) -> Iterator[Problem]:
        if not self.roles:
            yield Problem(key="roles", given="[]", text="leaves nothing to record", fix="Remove the key.")
        if not self.ranks and not self.all_ranks:
            fix = "Name a rank, or set profiler.all_ranks=True."
            yield Problem(key="ranks", given="[]", text="leaves nothing to record", fix=fix)
        if self.end_run and not self.steps:
            text = "ends the run before its first step: profiler.steps names none"
            yield Problem(key="end_run", given="True", text=text, fix="Set profiler.steps=[2].")
        if not {"cpu", "cuda"} & set(self.contents):
            text = "records no operation: neither cpu nor cuda is named"
            yield Problem(key="contents", given=show(self.contents), text=text, fix="Add cpu.")
