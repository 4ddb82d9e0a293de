"""An allocator that has nothing left at a chosen place: the error of the real one, raised there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridflow.engines.train.hollow import is_hollow

LAYER = "MLP"
"""Part of the class name of the module at which memory ends."""
CUDA_ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
CPU_ERROR = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
CPU_ERROR += "allocate 137438953472 bytes. Error code 12 (Cannot allocate memory)"


def raise_allocators_error(kind: str) -> None:
    """What the CUDA allocator raises, or the CPU's."""
    raise torch.OutOfMemoryError(CUDA_ERROR) if kind == "cuda" else RuntimeError(CPU_ERROR)


@contextmanager
def memory_ends(*, call: int, where: str, kind: str = "cuda", above_tokens: int = 0) -> Iterator[list[int]]:
    """Inside, the ``call``-th pass (from 0) of an MLP over more than ``above_tokens`` tokens has no memory.

    ``where``: forward or backward. Yields the list of tokens of every pass so far; ``call`` -1: every one of them.
    """
    seen: list[int] = []
    hits: list[int] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if LAYER not in type(module).__name__ or not isinstance(output, Tensor):
            return
        if is_hollow(output.to_local() if isinstance(output, DTensor) else output):
            return  # takes no memory
        tokens = output.shape[-2]
        seen.append(tokens)
        if tokens <= above_tokens:
            return
        hits.append(tokens)
        if call not in (-1, len(hits) - 1):
            return
        if where == "forward":
            raise_allocators_error(kind)
        if output.requires_grad:
            output.register_hook(lambda _: raise_allocators_error(kind))

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()
