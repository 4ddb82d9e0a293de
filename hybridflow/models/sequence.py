"""Ulysses sequence parallelism: ranks hold slices of the packed row everywhere but in attention.

Before attention one all-to-all turns (all heads, own tokens) into (own heads, all tokens), after it another turns back.
Where there are fewer key-value heads than ranks they are repeated, so that every rank gets one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.utils.errors import EngineError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_over_ranks(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, attend: Attend) -> Tensor:
    """``[1, m, H, Dh]`` attention of this rank's m tokens over all tokens of the group.

    Args:
        query, key, value: ``[1, heads, m, Dh]``, equal m on all ranks.
        group: ranks in token order. Collective: all of them call it, layer by layer.
        attend: ``[1, N, h, Dh]`` attention of ``[1, h, N, Dh]`` queries over whole keys and values.

    Raises:
        EngineError: when the ranks cannot share the heads.
    """
    size = dist.get_world_size(group)
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % size:
        raise EngineError(f"{heads} attention heads cannot be shared by {size} sequence-parallel ranks")
    if kv_heads % size:
        repeat = size // kv_heads if size % kv_heads == 0 else heads // kv_heads
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    blocks = [tensor[0].unflatten(0, (size, -1)) for tensor in (query, key, value)]
    counts = [block.shape[1] for block in blocks]
    received = _AllToAll.apply(torch.cat(blocks, 1), group)
    # [ranks, own heads, m, Dh] -> [own heads, N, Dh]
    whole = received.transpose(0, 1).flatten(1, 2)
    q, k, v = (part[None] for part in whole.split(counts))
    out = attend(q, k, v)[0]
    back = _AllToAll.apply(out.unflatten(0, (size, -1)), group)
    # [ranks = blocks of heads, m, own heads, Dh] -> [m, H, Dh]
    return back.transpose(0, 1).flatten(1, 2)[None]


class _AllToAll(torch.autograd.Function):
    """Block i of dim 0 goes to rank i; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


def join_tokens(own: Tensor, place: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """``[count]`` numbers of all ranks, of which this rank brings ``own`` at ``place``. Collective over ``group``.

    Every rank then computes the same loss, and only its own tokens send a gradient back.
    """
    return _Join.apply(own, place, count, group)


class _Join(torch.autograd.Function):
    """Sum of disjoint scatters; the gradient of a rank's own numbers."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, place: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(place)
        whole = own.new_zeros(count)
        whole[place] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return grad[place], None, None, None
