"""Attention over packed rows whose cost follows the sum of squared segment lengths, never the packed length.

Registered with transformers under ``NAME``: models built with ``attn_implementation=NAME`` call ``packed_attention``
and build no mask at all. Segments of equal length are one batch of causal attention (they are neighbours: ``pack``
sorts). Branches of a shared prompt are batches too: their queries meet the prompt's keys followed by their own, under
a mask of branch x (prompt + branch). On CUDA in half precision torch's variable-length kernel does all in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hybridflow.models.packing import ALONE
from hybridflow.models.sequence import attend_over_ranks
from hybridflow.utils import optional
from hybridflow.utils.errors import EngineError

NAME = "hybridflow_packed"

# Arguments of other models' attention that would change the numbers; None and 0 mean unused.
_UNKNOWN = ("softcap", "s_aux", "head_mask", "position_bias")


class Segments:
    """How a packed row is cut. A plain object: torch.compile would compile anew for every tuple.

    Args:
        lengths: of the segments, in packed order.
        prefixes: the segment that each one continues (an earlier one), ``ALONE`` for none; None: none does.
    """

    __slots__ = ("_seen", "lengths", "prefixes", "starts")

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int] | None = None) -> None:
        self.lengths = tuple(lengths)
        self.prefixes = (ALONE,) * len(self.lengths) if prefixes is None else tuple(prefixes)
        self.starts = tuple(accumulate(self.lengths, initial=0))[:-1]
        self._seen: tuple[tuple[int, ...], Tensor] | None = None

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """(first token, segments, length, prefix) of every run of equal lengths that continue the same segment."""
        at = 0
        for (length, prefix), run in groupby(zip(self.lengths, self.prefixes, strict=True)):
            count = len(list(run))
            yield self.starts[at], count, length, prefix
            at += count

    def before(self, prefix: int) -> slice:
        """Packed tokens of the segment ``prefix``; of none: empty."""
        if prefix == ALONE:
            return slice(0, 0)
        return slice(self.starts[prefix], self.starts[prefix] + self.lengths[prefix])

    def seen(self, device: torch.device) -> tuple[tuple[int, ...], Tensor]:
        """How many tokens each segment's last token sees, and their packed positions one after the other."""
        if self._seen is None:
            places = []
            for start, length, prefix in zip(self.starts, self.lengths, self.prefixes, strict=True):
                before = self.before(prefix)
                places.append([*range(before.start, before.stop), *range(start, start + length)])
            chosen = torch.tensor([place for part in places for place in part], device=device)
            self._seen = tuple(len(part) for part in places), chosen
        return self._seen


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
    _refuse(module, query, ranks, attention_mask, segments, dropout, others)
    assert segments is not None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q, k, v, segments, scaling, sliding_window)

    if sequence_group is not None:
        return attend_over_ranks(query, key, value, sequence_group, attend), None
    return attend(query, key, value), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _variable_length(query, key, value, segments, scaling, window)
    # [N, H, Dh] views; a block of g equal segments is then a plain [g, length, H, Dh] view.
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs = []
    for start, count, length, prefix in segments.blocks():
        own = [part[start : start + count * length].unflatten(0, (count, length)) for part in flat]
        before = segments.before(prefix)
        if prefix != ALONE:
            own[1:] = [
                torch.cat([part[before].expand(count, -1, -1, -1), held], 1)
                for part, held in zip(flat[1:], own[1:], strict=True)
            ]
        q, k, v = (part.transpose(1, 2) for part in own)
        band = _band(length, before.stop - before.start, window, query.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def _band(length: int, before: int, window: int | None, device: torch.device) -> Tensor | None:
    """``[length, before + length]``: causal, limited to the last ``window`` tokens; None: plain causal is the same."""
    if not before and (window is None or length <= window):
        return None
    at = torch.arange(before + length, device=device)
    distance = at[before:, None] - at[None]
    return (distance >= 0) & (distance < (window or before + length))


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    # Not run here: needs CUDA.
    varlen_attn = optional.load("torch.nn.attention.varlen:varlen_attn")
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    seen = segments.lengths
    if any(prefix != ALONE for prefix in segments.prefixes):
        # The kernel wants a segment's keys in one piece: each branch gets a copy of its prompt's before its own.
        seen, chosen = segments.seen(query.device)
        k, v = k[chosen], v[chosen]
    ends, ends_seen = (
        torch.tensor([0, *lengths], dtype=torch.int32, device=query.device).cumsum(0, dtype=torch.int32)
        for lengths in (segments.lengths, seen)
    )
    reach = -1 if window is None else window - 1
    # Causal from the end of the keys: the last query of a segment sees all of them.
    return varlen_attn(
        q,
        k,
        v,
        ends,
        ends_seen,
        max(segments.lengths),
        max(seen),
        scale=scaling,
        window_size=(reach, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )[None]


def _refuse(
    module: nn.Module,
    query: Tensor,
    ranks: int,
    mask: Tensor | None,
    segments: Segments | None,
    dropout: float,
    others: dict[str, Any],
) -> None:
    kind = type(module).__name__
    if segments is None:
        raise EngineError(f"{kind} does not hand its keyword arguments to attention: packed rows would see each other")
    if getattr(module, "is_causal", True) is False:
        raise EngineError(f"{kind} attends to later tokens too: it is no causal language model")
    if mask is not None:
        raise EngineError(f"{kind} got an attention mask beside packed rows: rows would see each other")
    if query.shape[0] != 1 or query.shape[2] * ranks != sum(segments.lengths):
        given, wanted = tuple(query.shape), sum(segments.lengths)
        raise EngineError(f"{kind} got queries {given} for segments of {wanted} tokens (cache on?)")
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
