"""State in host memory: a role's while it is idle, and activations from forward to backward.

Activations (``model.enable_activation_offload``): autograd hands every tensor that it saves to ``_pack`` and asks
``_unpack`` for it in the backward pass. Copies run on the stream that computes, from and to pinned memory: in order
with the kernels around them, never ahead of them. With activation checkpointing only the inputs of layers are saved,
and those are what should travel; without it everything that a layer keeps does, several times where several operations
keep it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hybridflow.models.heads import PackedModel
from hybridflow.models.load import placed_like

logger = logging.getLogger(__name__)

SMALLEST_BYTES = 64 << 10
"""Smaller tensors stay: their copies would cost more than the room they make."""


@dataclass(frozen=True, slots=True)
class _Parked:
    """A saved tensor in host memory."""

    host: Tensor
    of: Tensor | None
    """What it was a block of, without data; None: a plain tensor."""


class ActivationOffload(saved_tensors_hooks):
    """Context in which what autograd saves on ``device`` is kept in host memory; parameters and small tensors stay.

    Args:
        device: whose memory is to be spared. On ``cpu`` the copies would lie where the originals are: engines there do
            not use this (a test does).
        smallest_bytes: smaller tensors stay.
    """

    def __init__(self, device: str, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._device = torch.device(device)
        self._smallest = smallest_bytes
        self.parked = 0
        """Tensors moved so far."""
        self.parked_bytes = 0
        """Their bytes."""
        super().__init__(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Any:
        # Views of a parameter (its transpose) are saved by matrix products: the parameter stays where it is.
        source = saved if saved._base is None else saved._base
        local = saved.to_local() if isinstance(saved, DTensor) else saved
        nbytes = local.numel() * local.element_size()
        if isinstance(source, nn.Parameter) or local.device != self._device or nbytes < self._smallest:
            return saved
        pinned = self._device.type == "cuda"
        host = torch.empty_like(local, device="cpu", pin_memory=pinned, requires_grad=False)
        host.copy_(local.detach(), non_blocking=pinned)
        self.parked += 1
        self.parked_bytes += nbytes
        if not isinstance(saved, DTensor):
            return _Parked(host, None)
        return _Parked(host, placed_like(torch.empty_like(local, device="meta"), saved))

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Parked):
            return kept
        local = kept.host.to(self._device, non_blocking=self._device.type == "cuda")
        return local if kept.of is None else placed_like(local, kept.of)


def offload_activations(model: PackedModel, device: str) -> None:
    """Lets the body's activations wait in host memory; on ``cpu`` they do anyway, and a warning says so."""
    if device == "cpu":
        logger.warning("model.enable_activation_offload does nothing on a CPU: activations are in host memory")
        return
    # Not run here: needs CUDA.
    model.around_body = partial(ActivationOffload, device)


def move_state(what: Iterable[str], device: str, *, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Moves ``parameters`` and/or ``optimizer`` to ``device``. Not run here: needs CUDA."""
    if "parameters" in what:
        model.to(device)
    if "optimizer" in what and optimizer is not None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[key] = value.to(device)
    if device == "cpu":
        torch.cuda.empty_cache()
