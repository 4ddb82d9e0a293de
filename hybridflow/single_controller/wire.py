"""Values as bytes: what crosses a process boundary, so that both kinds of groups count and fail alike.

Plain CPU tensors are written as their raw bytes (pickle's own way through ``torch.save`` costs about 0.1 ms a tensor);
everything else is pickled. A reference (batch/refs.py) is written as its token, size and owner; a token that must not
be pickled (Ray counts who holds its references) travels beside the bytes. Only processes that this run started are
read from.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch.refs import Kept

Open = Callable[[Any, int, str], Kept]
"""A reference from its token, size and owner: ``Store.open``."""


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, beside: list[Any] | None) -> None:
        super().__init__(out, protocol=5)
        self._beside = beside
        self._places: dict[Kept, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Kept):
            return None
        if self._beside is None:
            return value.token, value.size, value.owner
        if value not in self._places:
            self._places[value] = len(self._beside)
            self._beside.append(value.token)
        return self._places[value], value.size, value.owner

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


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, open_kept: Open, beside: Sequence[Any] | None) -> None:
        super().__init__(data)
        self._open = open_kept
        self._beside = beside
        self._known: dict[Any, Kept] = {}

    def persistent_load(self, pid: Any) -> Kept:
        found, size, owner = pid
        if found not in self._known:
            self._known[found] = self._open(found if self._beside is None else self._beside[found], size, owner)
        return self._known[found]


def pack(value: Any, beside: list[Any] | None = None) -> bytes:
    """``value`` as bytes; tokens of references are appended to ``beside`` where it is given.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: when a part of it cannot be pickled.
    """
    out = io.BytesIO()
    _Pickler(out, beside).dump(value)
    return out.getvalue()


def unpack(
    data: bytes | bytearray | memoryview, open_kept: Open | None = None, beside: Sequence[Any] | None = None
) -> Any:
    """What ``pack`` was given; tensors own their memory and can be written.

    ``open_kept`` makes the references; without it, data that holds some is refused (``pickle.UnpicklingError``).
    """
    if open_kept is None:
        return pickle.loads(data)
    return _Unpickler(io.BytesIO(data), open_kept, beside).load()
