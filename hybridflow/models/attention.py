"""Attention over packed rows whose cost follows the sum of squared segment lengths, never the packed length.

Registered with transformers under ``NAME``: models built with ``attn_implementation=NAME`` call ``packed_attention``
and build no mask at all. Segments of equal length are one batch of causal attention (they are neighbours: ``pack``
sorts). On CUDA in half precision torch's variable-length kernel does the same in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hybridflow.models.sequence import attend_over_ranks
from hybridflow.utils import optional
from hybridflow.utils.errors import EngineError

NAME = "hybridflow_packed"

# Arguments of other models' attention that would change the numbers; None and 0 mean unused.
_UNKNOWN = ("softcap", "s_aux", "head_mask", "position_bias")


class Segments:
    """Lengths of a packed row's segments. A plain object: torch.compile would compile anew for every tuple."""

    __slots__ = ("lengths",)

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``[1, N, H, Dh]`` attention output of packed queries ``[1, H, N, Dh]`` over keys and values ``[1, K, N, Dh]``.

    Under ``sequence_group`` every rank brings and gets its slice of the N tokens (models/sequence.py).

    Raises:
        EngineError: when a mask, a cache or an unknown attention argument would make packing silently wrong.
    """
    ranks = 1 if sequence_group is None else dist.get_world_size(sequence_group)
    lengths = None if segments is None else segments.lengths
    _refuse(module, query, ranks, attention_mask, lengths, dropout, others)
    assert lengths is not None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q, k, v, lengths, scaling, sliding_window)

    if sequence_group is not None:
        return attend_over_ranks(query, key, value, sequence_group, attend), None
    return attend(query, key, value), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[int], scaling: float | None, window: int | None
) -> Tensor:
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and window is None:
        return _variable_length(query, key, value, segments, scaling)
    # [N, H, Dh] views; a block of g equal segments is then a plain [g, length, H, Dh] view.
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs = []
    for start, count, length in _blocks(segments):
        q, k, v = (part[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2) for part in flat)
        band = _band(length, window, query.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def _blocks(segments: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first token, segments, length) of every run of equal lengths."""
    start = 0
    for length, run in groupby(segments):
        count = len(list(run))
        yield start, count, length
        start += count * length


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Causal mask limited to the last ``window`` tokens; None where plain causal attention is the same."""
    if window is None or length <= window:
        return None
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None]
    return (distance >= 0) & (distance < window)


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[int], scaling: float | None
) -> Tensor:
    # Not run here: needs CUDA.
    varlen_attn = optional.load("torch.nn.attention.varlen:varlen_attn")
    repeat = query.shape[1] // key.shape[1]
    q = query[0].transpose(0, 1).contiguous()
    k, v = (t[0].repeat_interleave(repeat, 0).transpose(0, 1).contiguous() for t in (key, value))
    ends = torch.tensor([0, *segments], dtype=torch.int32, device=query.device).cumsum(0, dtype=torch.int32)
    longest = max(segments)
    return varlen_attn(q, k, v, ends, ends, longest, longest, is_causal=True, scale=scaling)[None]


def _refuse(
    module: nn.Module,
    query: Tensor,
    ranks: int,
    mask: Tensor | None,
    segments: Sequence[int] | None,
    dropout: float,
    others: dict[str, Any],
) -> None:
    kind = type(module).__name__
    if segments is None:
        raise EngineError(f"{kind} does not hand its keyword arguments to attention: packed rows would see each other")
    if mask is not None:
        raise EngineError(f"{kind} got an attention mask beside packed rows: rows would see each other")
    if query.shape[0] != 1 or query.shape[2] * ranks != sum(segments):
        raise EngineError(f"{kind} got queries {tuple(query.shape)} for segments of {sum(segments)} tokens (cache on?)")
    if dropout:
        raise EngineError(f"{kind} uses attention dropout {dropout}: old and new log-probs would differ at random")
    for name in _UNKNOWN:
        if others.get(name) is not None:
            raise EngineError(f"{kind} needs {name} in attention, which packed attention does not compute")


def attend_outside_graphs() -> None:
    """From here on torch.compile leaves packed attention alone, in this process."""
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
