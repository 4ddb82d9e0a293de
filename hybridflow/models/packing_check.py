"""A model that nobody has tried yet is asked, before it trains, whether it can be packed: by its own weights.

Two rows of a few tokens go through it packed, each alone, and through transformers' own forward:

    states of the packed rows  =  states of each row alone       else tokens of other rows reach them
    log-probs that we make      =  those of transformers          else its head is more than hidden @ W^T

Recurrent layers and convolutions fail the first, heads with layers or caps of their own the second. Layers that differ
only beyond a window are found by name: a few tokens cannot show them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridflow.models.attention import Segments
from hybridflow.models.packing import ALONE, Packed
from hybridflow.utils.errors import ConfigError

LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers (``config.layer_types``) whose rows packed attention keeps apart."""
_LENGTHS = (5, 4)
_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2}
"""Of states relative to their largest and of log-probs in nats: a thousand times what rounding does, ..."""
_HALF_TOLERANCE = 0.3
"""... and in half precision some ten times."""


def check_layer_kinds(config: Any) -> None:
    """Raises ConfigError where layers of the model mix tokens in a way that packed rows would not survive."""
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if foreign := sorted(kinds - LAYER_KINDS):
        raise ConfigError(
            f"model type {config.model_type!r} has layers of kind {', '.join(foreign)}: packed rows would see each "
            f"other in them (known are {', '.join(sorted(LAYER_KINDS))})"
        )


def sample_rows(vocabulary: int, device: torch.device | str) -> Packed:
    """Two rows of made-up tokens, packed."""
    tokens = sum(_LENGTHS)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    ids = (torch.arange(tokens, device=device) * 7 + 3) % vocabulary
    positions = torch.cat([torch.arange(length, device=device) for length in _LENGTHS])
    return Packed(
        input_ids=ids[None], position_ids=positions[None], lengths=_LENGTHS, prefixes=(ALONE,) * len(_LENGTHS),
        select=none, targets=none, row=none, column=none, shape=(0, 0),
    )  # fmt: skip


def rows_alone(packed: Packed) -> list[dict[str, Any]]:
    """Arguments of a forward over each row by itself."""
    start, found = 0, []
    for length in packed.lengths:
        part = slice(start, start + length)
        found.append(
            {
                "input_ids": packed.input_ids[:, part],
                "position_ids": packed.position_ids[:, part],
                "attention_mask": None,
                "use_cache": False,
                "segments": Segments((length,)),
            }
        )
        start += length
    return found


def judge(kind: str, states: Tensor, alone: Tensor, log_probs: Tensor | None, own: Tensor | None) -> None:
    """Compares what ``PackedModel.forward`` found of the two laws above; log-probs of a value model are None.

    Raises:
        ConfigError: one of them does not hold; says which, and by how much.
    """
    tolerance = _TOLERANCE.get(states.dtype, _HALF_TOLERANCE)
    apart = float((states - alone).abs().max() / alone.abs().max().clamp(min=1e-6))
    if not apart <= tolerance:
        raise ConfigError(
            f"model type {kind!r} cannot be trained on packed rows: states of a row change by {apart:.2g} of their "
            "size when another row is beside it"
        )
    if log_probs is None or own is None:
        return
    difference = float((log_probs - own).abs().max())
    if not difference <= tolerance:
        raise ConfigError(
            f"model type {kind!r} makes its logits in another way than hidden @ W^T + b: log-probs of a token differ "
            f"by {difference:.2g} nats from those of transformers; its head is not supported"
        )
