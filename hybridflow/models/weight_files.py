"""The safetensors of a model folder, and which stored tensor holds which block of a parameter.

A parameter has one stored tensor of its name. The stacked experts of a layer may also lie there one by one, as the hub
has Qwen3-MoE and as transformers saves it:

    in the module                            in the folder
    mlp.experts.gate_up_proj  [E, 2 n, D]    mlp.experts.0.gate_proj.weight [n, D], mlp.experts.0.up_proj.weight, ...
    mlp.experts.down_proj     [E, D, n]      mlp.experts.0.down_proj.weight [D, n], ...
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.utils.errors import MachineError

Box = tuple[tuple[int, int], ...]

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of safetensors headers."""
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parameters of stacked experts, and the projections of one expert that lie in them one below the other."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor and the block of the parameter that it holds."""

    stored: str
    """Its name in the folder."""
    box: Box
    """Half-open range of every dim of the parameter."""
    shape: tuple[int, ...]
    """Its own shape: that of the box, without the dim that counts experts."""


def expert_pieces(name: str, shape: Sequence[int]) -> tuple[Piece, ...]:
    """Where a layer's stacked experts lie when a folder has them one by one; empty for any other parameter."""
    prefix, _, leaf = name.rpartition(".")
    projections = _PROJECTIONS.get(leaf, ())
    if not projections or not prefix.endswith(".experts") or len(shape) != 3 or shape[1] % len(projections):
        return ()
    experts, rows, columns = shape
    each = rows // len(projections)
    return tuple(
        Piece(
            f"{prefix}.{expert}.{projection}.weight",
            ((expert, expert + 1), (at * each, (at + 1) * each), (0, columns)),
            (each, columns),
        )
        for expert in range(experts)
        for at, projection in enumerate(projections)
    )


def block_of(piece: Piece, full: Tensor) -> Tensor:
    """The block of the full parameter that ``piece`` stores, in the shape it has in the folder; shares storage."""
    return full[tuple(slice(low, high) for low, high in piece.box)].reshape(piece.shape)


class WeightFiles:
    """The safetensors of one model folder, read tensor by tensor.

    Raises:
        MachineError: when there are none.
    """

    def __init__(self, path: str) -> None:
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._file = {name: folder / file for name, file in weight_map.items()}
        elif (folder / "model.safetensors").exists():
            with safe_open(folder / "model.safetensors", framework="pt") as file:
                self._file = dict.fromkeys(file.keys(), folder / "model.safetensors")
        else:
            raise MachineError(f"{folder} has no model.safetensors (nor an index of several): convert the model first")
        self._open: dict[Path, Any] = {}

    def pieces(self, name: str, shape: Sequence[int], aliases: Iterable[str] = ()) -> tuple[Piece, ...]:
        """What the parameter ``name`` of ``shape`` (or of its other names ``aliases``) is read from; empty: not there.

        Raises:
            MachineError: when a stored tensor has another shape, or some experts of a layer are missing.
        """
        stored = next((one for one in (name, *aliases) if one in self._file), None)
        if stored is not None:
            found = (Piece(stored, tuple((0, size) for size in shape), tuple(shape)),)
        else:
            expected = expert_pieces(name, shape)
            found = tuple(piece for piece in expected if piece.stored in self._file)
            if 0 < len(found) < len(expected):
                absent = next(piece.stored for piece in expected if piece.stored not in self._file)
                parts = f"{len(found)} of {len(expected)} parts of {name} are there"
                raise MachineError(f"{self._folder}: no weights for {absent} ({parts})")
        for piece in found:
            stored_shape, _ = self.describe(piece.stored)
            if stored_shape != piece.shape:
                raise MachineError(
                    f"{self._folder}: {piece.stored} has shape {stored_shape}, the model needs {piece.shape}"
                )
        return found

    def describe(self, stored: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a stored tensor; reads no data."""
        header = self._reader(stored).get_slice(stored)
        kind = header.get_dtype()
        if kind not in _STORED:
            raise MachineError(
                f"{self._file[stored]}: {stored} is stored as {kind}; weights must be one of {list(_STORED)}"
            )
        return tuple(header.get_shape()), _STORED[kind]

    def read(self, stored: str) -> Tensor:
        """The full stored tensor on the host."""
        return self._reader(stored).get_tensor(stored)

    def assemble(self, pieces: Sequence[Piece], shape: Sequence[int]) -> Tensor:
        """The full parameter of ``shape``, put together from its ``pieces``."""
        if len(pieces) == 1 and pieces[0].shape == tuple(shape):
            return self.read(pieces[0].stored)
        full = torch.empty(tuple(shape), dtype=self.describe(pieces[0].stored)[1])
        for piece in pieces:
            block_of(piece, full).copy_(self.read(piece.stored))
        return full

    def _reader(self, stored: str) -> Any:
        path = self._file[stored]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path]


class ConvertedWeights(WeightFiles):
    """The weights of a folder whose names or shapes are not those of the module: transformers converts them.

    The whole model is held in host memory while this lives, by the one rank that reads.

    Raises:
        MachineError: transformers does not find all weights either.
    """

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
        self._folder = Path(path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True
        )
        model, about = loaded
        if about["missing_keys"]:
            names = sorted(about["missing_keys"])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise MachineError(f"{path}: no weights for {', '.join(names[:5])}{more}")
        self._held: dict[str, Tensor] = model.state_dict()

    def pieces(self, name: str, shape: Sequence[int], aliases: Iterable[str] = ()) -> tuple[Piece, ...]:
        """See ``WeightFiles``: a parameter is one piece, or is not there."""
        stored = next((one for one in (name, *aliases) if one in self._held), None)
        if stored is None:
            return ()
        if tuple(self._held[stored].shape) != tuple(shape):
            raise MachineError(
                f"{self._folder}: {stored} has shape {tuple(self._held[stored].shape)}, the model needs {tuple(shape)}"
            )
        return (Piece(stored, tuple((0, size) for size in shape), tuple(shape)),)

    def describe(self, stored: str) -> tuple[tuple[int, ...], torch.dtype]:
        """See ``WeightFiles``."""
        return tuple(self._held[stored].shape), self._held[stored].dtype

    def read(self, stored: str) -> Tensor:
        """See ``WeightFiles``."""
        return self._held[stored]
