"""Values as bytes: what crosses a process boundary, so that both kinds of groups count and fail alike.

Plain CPU tensors are written as their raw bytes (pickle's own way through ``torch.save`` costs about 0.1 ms a tensor);
everything else is pickled. Only processes that this run started are read from.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        if value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        raw: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def pack(value: Any) -> bytes:
    """``value`` as bytes.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: when a part of it cannot be pickled.
    """
    out = io.BytesIO()
    _Pickler(out, protocol=5).dump(value)
    return out.getvalue()


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """What ``pack`` was given; tensors own their memory and can be written."""
    return pickle.loads(data)
