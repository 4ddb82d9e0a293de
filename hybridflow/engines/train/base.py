"""The interface of a training engine: forward over rows, update over mini-batches, shards for the hybrid engine.

Rows come in as a padded ``Batch`` (this rank's data-parallel block) and results go out padded; inside, rows are
packed. The loss contract is in ``algorithms/contract.py``: an engine adds the losses of micro-batches and ranks, never
averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from hybridflow.algorithms.contract import Counts, Loss
from hybridflow.batch.batch import Batch
from hybridflow.engines.train.work import Work
from hybridflow.topology.parallel import ParallelDims


@dataclass(frozen=True, slots=True)
class Shard:
    """One training parameter as this rank stores it."""

    name: str
    """Hugging Face name."""
    local: Tensor
    """This rank's block (may be empty)."""
    box: tuple[tuple[int, int], ...]
    """Half-open range of every dim of the full parameter that ``local`` holds."""
    shape: tuple[int, ...]
    """Full shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """How rows of a rank are cut into micro-batches."""

    max_tokens: int | None = None
    """Token budget of one data-parallel coordinate (its sp ranks share the tokens); None: by count."""
    max_rows: int | None = None
    """Row count when there is no budget."""


class TrainEngine(Protocol):
    """One rank of a training engine."""

    dims: ParallelDims

    def forward(
        self, rows: Batch, needs: frozenset[str], *, temperature: float, micro: MicroBatching
    ) -> dict[str, Tensor]:
        """Without gradient: the asked-for fields of ``Outputs`` as ``[b, T]`` float32, row order kept."""
        ...

    def forward_without_adapters(
        self, rows: Batch, needs: frozenset[str], *, temperature: float, micro: MicroBatching
    ) -> dict[str, Tensor]:
        """``forward`` of the frozen base: with LoRA, the reference policy. Collective.

        Raises:
            EngineError: when the engine has no adapters.
        """
        ...

    def compare_with(self, reference: Self) -> None:
        """From now on ``full_kl`` can be asked for: the exact KL to ``reference``, evaluated on the same micro-batches.

        ``reference`` is another engine in this process, or with LoRA this one: its base without adapters.

        Raises:
            ConfigError: when the layouts do not allow it.
        """
        ...

    def update(
        self, rows: Batch, loss: Loss, *, temperature: float, micro: MicroBatching, counts: Counts
    ) -> dict[str, float]:
        """One optimizer step on one mini-batch (this rank's rows of it). Collective: every rank calls it.

        Metrics are already combined over ranks, the same on every rank. A non-finite loss or gradient skips the step
        (``grad/skipped`` is 1) and leaves weights and moments untouched.
        """
        ...

    def counts(self, rows: Batch) -> Counts:
        """Counts of a mini-batch summed over data-parallel ranks. Collective."""
        ...

    def work(self) -> Work:
        """What forwards and updates have computed since the last call, over all ranks. Collective."""
        ...

    def peak_flops(self) -> float:
        """FLOP/s that one device can reach in the dtype of forward and backward."""
        ...

    def largest(self, value: float) -> float:
        """The largest ``value`` of all ranks. Collective."""
        ...

    def held_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state that this rank holds now."""
        ...

    def schedule_step(self) -> float:
        """Advances the learning-rate schedule by one unit; the rate that the next update will use."""
        ...

    def shards(self) -> Sequence[Shard]:
        """This rank's blocks of all parameters, in one order on all ranks; buffers excluded, ties once."""
        ...

    def base_shards(self) -> Sequence[Shard]:
        """``shards`` of the frozen base: with LoRA, without the adapters."""
        ...

    def adapter_shards(self) -> Sequence[Shard]:
        """This rank's blocks of LoRA's A and B, in one order on all ranks; empty without adapters."""
        ...

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape by Hugging Face name."""
        ...

    def offload(self, what: Iterable[str]) -> None:
        """Moves ``parameters`` and/or ``optimizer`` to host memory (GPU only; nothing to do on CPU)."""
        ...

    def onload(self, what: Iterable[str]) -> None:
        """Moves them back."""
        ...

    def save(self, folder: str, *, contents: Sequence[str] = ..., background: bool = False) -> None:
        """Writes this role's model, optimizer and schedule into ``folder``. Collective.

        In the background only a copy is made before this returns, and ``finish_save`` ends the save.
        """
        ...

    def saved(self) -> bool:
        """Whether this rank has nothing left to write; does not wait."""
        ...

    def finish_save(self) -> None:
        """Waits for a save in the background and completes it. Collective."""
        ...

    def load(self, folder: str, *, contents: Sequence[str] = ...) -> None:
        """Restores what ``save`` wrote, at any layout. Collective."""
        ...

    def save_hf(self, folder: str, *, dtype: str | None = None) -> None:
        """Writes a Hugging Face folder that ``from_pretrained`` reads. Collective."""
        ...
