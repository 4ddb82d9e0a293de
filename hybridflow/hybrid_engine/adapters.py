"""LoRA without moving the base: adapters travel, and the generator merges them into its own copy of the base.

    first publish    base weights -> generator's storage -> a copy of the adapted ones is kept here
    every publish    A, B (this rank's parts only) -> W := base + s B A, written row block by row block

The base never changes, so it moves once. Of a weight's box (rows x columns) a rank needs the rows of B and the columns
of A, whatever the generator's layout: they are boxes like any others, and go through the same plan, transport and
checks. What arrives is exact; what is merged equals the trainer's own merge but for the order of sums in a matmul.

A fresh merge from the kept base is exact at every step; adding differences to the weights in place would need no copy,
and would drift by a rounding a step. The copy is held in the generator's dtype: no loss where the model was stored so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engines.rollout.base import NO_VERSION, EngineParameters, Part
from hybridflow.engines.train.base import Shard
from hybridflow.hybrid_engine.publish import Metrics, Publisher

A, B = "lora_A", "lora_B"


@dataclass(frozen=True, slots=True)
class Adapted:
    """What one block of an adapted weight in the generator's storage is merged from."""

    base: Tensor
    """Its value without adapters, ``[rows, columns]``."""
    a: Tensor
    """``[rank, columns]`` float32."""
    b: Tensor
    """``[rows, rank]`` float32."""


class AdapterPublisher:
    """``Publisher`` for a trainer with LoRA; same call, same promises. One per rank; every method is collective.

    Args:
        base_shards: this rank's blocks of all weights without adapters.
        adapter_shards: this rank's blocks of the adapters, named ``<module>.lora_A.weight`` and ``.lora_B.weight``.
        parameters: as ``Publisher``; what is not adapted must stay there from the first publish on.
        written: as ``Publisher``.
        scale: ``s`` of ``W + s B A``.
        rank: rows of A.
        group: as ``Publisher``.
        bucket_bytes: as ``Publisher``; a merge uses no more than that beside the storage either.
        stale_copies: as ``Publisher``; asked once adapters are merged.
        settings: further arguments of ``Publisher``.
    """

    def __init__(
        self,
        base_shards: Callable[[], Sequence[Shard]],
        adapter_shards: Callable[[], Sequence[Shard]],
        parameters: Callable[[], EngineParameters],
        written: Callable[[int], None],
        *,
        scale: float,
        rank: int,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 64 << 20,
        stale_copies: Callable[[], Sequence[str]] = tuple,
        **settings: Any,
    ) -> None:
        self._settings = {"group": group, "bucket_bytes": bucket_bytes, **settings}
        self._base = Publisher(base_shards, parameters, self._base_written, **self._settings)
        self._adapter_shards = adapter_shards
        self._parameters = parameters
        self._written = written
        self._scale = scale
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._stale_copies = stale_copies
        self._names: frozenset[str] = frozenset()
        self._adapted: list[Adapted] = []
        self._merge_seconds = 0.0
        self._adapters: Publisher | None = None

    @torch.no_grad()
    def publish(self, version: int) -> Metrics:
        """On return every generator holds ``version``; metrics as ``Publisher.publish``, and ``publish/merge_seconds``.

        The first call moves the base too.

        Raises:
            EngineError: as ``Publisher.publish``.
        """
        first: Metrics = {}
        if self._adapters is None:
            first = self._base.publish(version)
            names = self._adapted_names()
            self._adapters = self._base.together("keeping the base", lambda: self._prepare(names))
        metrics = self._adapters.publish(version) | {"publish/merge_seconds": self._merge_seconds}
        return _added(first, metrics) if first else metrics

    def held_bytes(self) -> int:
        """Bytes of the kept base and of the adapters beside it."""
        return sum(held.nbytes for block in self._adapted for held in (block.base, block.a, block.b))

    def _prepare(self, names: frozenset[str]) -> Publisher:
        """Keeps the base of the weights of these names, and makes room for their adapters."""
        self._adapted.clear()
        parts = []
        self._names = names
        for part in self._adapted_parts():
            rows, columns = part.hf_box
            a = self._room(part, A, ((0, self._rank), columns), (self._rank, part.hf_shape[1]))
            b = self._room(part, B, (rows, (0, self._rank)), (part.hf_shape[0], self._rank))
            parts += [a, b]
            self._adapted.append(Adapted(part.view.clone(), a.view, b.view))
        room = EngineParameters(tuple(parts))
        return Publisher(
            self._adapter_shards, lambda: room, self._merge, stale_copies=self._stale_copies, **self._settings
        )

    def _adapted_parts(self) -> list[Part]:
        """Where adapted weights lie now, in one order."""
        return [part for part in self._parameters().parts if part.hf_name in self._names]

    def _adapted_names(self) -> frozenset[str]:
        """Names of adapted weights; ranks that only generate learn them from those that train. Collective."""
        own = [shard.name.replace(f".{A}.", ".") for shard in self._adapter_shards() if f".{A}." in shard.name]
        return frozenset(name for names in self._base.gather(own) for name in names)

    def _room(self, part: Part, half: str, box: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> Part:
        """Storage for the part of A or B that this block needs."""
        module, _, leaf = part.hf_name.rpartition(".")
        view = torch.zeros([high - low for low, high in box], dtype=torch.float32, device=part.view.device)
        return Part(f"{module}.{half}.{leaf}", view, box, shape)

    def _base_written(self, version: int) -> None:
        """The base alone is no version; a failure on the way must be told."""
        if version == NO_VERSION:
            self._written(NO_VERSION)

    def _merge(self, version: int) -> None:
        """Writes base + s B A, then tells the generator its version."""
        started = time.perf_counter()
        if version != NO_VERSION:
            for block, part in zip(self._adapted, self._adapted_parts(), strict=True):
                for rows in _row_blocks(part.view.shape, self._bucket_bytes):
                    delta = self._scale * (block.b[rows] @ block.a)
                    part.view[rows].copy_(delta.add_(block.base[rows]))
        self._merge_seconds = time.perf_counter() - started
        self._written(version)


def _row_blocks(shape: Sequence[int], limit_bytes: int) -> Iterable[slice]:
    """Blocks of rows whose float32 temporaries (product, scaled) stay below ``limit_bytes``."""
    rows, columns = shape
    step = max(1, limit_bytes // (2 * 4 * max(1, columns)))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _added(first: Metrics, second: Metrics) -> Metrics:
    """Metrics of two transfers one after the other."""
    names = dict.fromkeys((*first, *second))
    total = {name: first.get(name, 0.0) + second.get(name, 0.0) for name in names}
    peak, bound = "publish/peak_extra_bytes", total["publish/bound_bytes"]
    total[peak] = max(first[peak], second[peak])
    total["publish/ratio_to_bound"] = total["publish/bytes"] / bound if bound else 1.0
    return total
