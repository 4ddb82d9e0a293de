"""What forwards and updates compute, counted: FLOPs, tokens, made-up tokens, and how even micro-batches are.

For a dense decoder and one packed micro-batch of N tokens in segments of l_i, of which the head reads n:

    forward    2 N W + 2 n V + sum_i 2 l_i (l_i + 1) A      W weights of the layers' matrices, V of the head,
    backward   the same for gradients of activations            A = layers x heads x head size (causal attention)
               + 2 N W' + 2 n V' + the same attention term      W', V' what of them is trained

so 6 N W + 6 n V + attention where all weights are trained. What is recomputed does not count. A prompt that rows share
counts once, and each branch behind it adds its tokens and its pairs with the prompt. Of stacked experts W counts those
that a token is routed to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.batch.balance import row_cost
from hybridflow.models.packing import Packed
from hybridflow.topology.parallel import ParallelDims

_DATASHEET: dict[str, float] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""Dense bf16 FLOP/s by part of the device's name; the first that fits counts."""
_MEASURED_SIZE = 1024
"""Edge of the matrices whose product is timed where no datasheet is known: 2 GFLOP, milliseconds on a CPU core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all ranks have computed."""

    flops: float
    """Of the model, all ranks together."""
    tokens: int
    """Tokens of rows, each once; a prompt that rows share is one."""
    slots: int
    """Tokens that were computed: rows, roundings to equal slices, and stand-ins of ranks without rows."""
    imbalance: float
    """Cost of the most loaded rank of every round of micro-batches over the mean of all; 1: nobody waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Numbers of a decoder that decide its FLOPs."""

    layer_weights: int
    trained_layer_weights: int
    head_weights: int
    trained_head_weights: int
    attention_width: int
    """layers x heads x head size."""
    hidden: int

    def forward_flops(self, lengths: Sequence[int], read: int, seen: Sequence[int] | None = None) -> float:
        """FLOPs of a forward over segments of ``lengths``, ``read`` tokens of which reach the head.

        ``seen`` are the tokens before each segment that its own also attend to; None: none.
        """
        weights = sum(lengths) * self.layer_weights + read * self.head_weights
        return 2.0 * (weights + _pairs(lengths, seen) * self.attention_width)

    def update_flops(self, lengths: Sequence[int], read: int, seen: Sequence[int] | None = None) -> float:
        """FLOPs of forward and backward; arguments as those of ``forward_flops``."""
        layers = sum(lengths) * (self.layer_weights + self.trained_layer_weights)
        head = read * (self.head_weights + self.trained_head_weights)
        attention = 2 * _pairs(lengths, seen) * self.attention_width
        return self.forward_flops(lengths, read, seen) + 2.0 * (layers + head + attention)


def _pairs(lengths: Sequence[int], seen: Sequence[int] | None) -> int:
    """Twice the pairs of tokens that attend to each other."""
    before = seen or [0] * len(lengths)
    return sum(length * (2 * more + length + 1) for length, more in zip(lengths, before, strict=True))


def architecture(
    config: Any, shapes: Mapping[str, tuple[int, ...]], trained: frozenset[str], layers: frozenset[str], vocabulary: int
) -> Architecture:
    """The numbers of a model.

    Args:
        config: Hugging Face's.
        shapes: full shape of every parameter by name.
        trained: names with a gradient.
        layers: names inside the body's layers.
        vocabulary: columns of the head that are computed; 1 for a value head.
    """
    matrices = {name: math.prod(shapes[name]) for name in layers if len(shapes[name]) in (2, 3)}
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    # A token passes through the experts that its router chose for it, of all that are stacked in dim 0.
    sizes = {
        name: size // shapes[name][0] * chosen if len(shapes[name]) == 3 else size for name, size in matrices.items()
    }
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_size = int(getattr(config, "head_dim", None) or hidden // heads)
    head = vocabulary * hidden
    trains_head = any(name in trained for name in shapes if name not in layers and len(shapes[name]) == 2)
    return Architecture(
        layer_weights=sum(sizes.values()),
        trained_layer_weights=sum(size for name, size in sizes.items() if name in trained),
        head_weights=head,
        trained_head_weights=head if trains_head else 0,
        attention_width=int(config.num_hidden_layers) * heads * head_size,
        hidden=hidden,
    )


class WorkMeter:
    """Adds up what this rank computes."""

    def __init__(self, numbers: Architecture, dims: ParallelDims, device: str) -> None:
        self._numbers = numbers
        self._dims = dims
        self._device = device
        self._flops = 0.0
        self._tokens = self._slots = 0
        self._rounds: list[float] = []

    def count(self, packs: Sequence[Packed], multiple: int, *, trains: bool) -> None:
        """A forward (or update, if it ``trains``) over ``packs``; the model rounds their lengths up to ``multiple``."""
        flops = self._numbers.update_flops if trains else self._numbers.forward_flops
        for packed in packs:
            self._slots += packed.tokens + -packed.tokens % multiple
            cost = 0
            if not packed.stands_in:
                self._tokens += packed.tokens
                self._flops += flops(packed.lengths, packed.targets.numel(), packed.seen)
                hidden = self._numbers.hidden
                cost = sum(row_cost(length, hidden=hidden) for length in packed.lengths)
                cost += sum(2 * length * more for length, more in zip(packed.lengths, packed.seen, strict=True))
            self._rounds.append(float(cost))

    def take(self) -> Work:
        """All since the last call, over all ranks. Collective; every rank has counted equally many micro-batches."""
        sums = torch.tensor([self._flops, self._tokens, self._slots, sum(self._rounds)], dtype=torch.float64)
        largest = torch.tensor(self._rounds, dtype=torch.float64)
        if self._dims.world > 1:
            sums, largest = sums.to(self._device), largest.to(self._device)
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            # Ranks of one data-parallel coordinate have counted the same rows.
            sums = sums / (self._dims.world // self._dims.dp)
        self._flops, self._tokens, self._slots, self._rounds = 0.0, 0, 0, []
        flops, tokens, slots, cost = sums.tolist()
        imbalance = float(largest.sum()) * self._dims.dp / cost if cost else 1.0
        return Work(flops=flops, tokens=int(tokens), slots=int(slots), imbalance=imbalance)


@cache
def peak_flops(device: str, dtype: torch.dtype) -> float:
    """FLOP/s that one device can reach in ``dtype``: its datasheet's (half precision), or those of a matrix product."""
    if device.startswith("cuda") and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        known = next((flops for part, flops in _DATASHEET.items() if part in name), None)
        if known is not None:
            return known
    left, right = (torch.ones(_MEASURED_SIZE, _MEASURED_SIZE, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        float((left @ right)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2.0 * _MEASURED_SIZE**3 / best
