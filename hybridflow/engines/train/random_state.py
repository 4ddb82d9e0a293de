"""The random streams of a process, in a form that is saved and loaded without pickling objects."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The streams of this process (torch, CUDA, numpy, Python) as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Goes on with streams of ``random_state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def write_random_state(state: Mapping[str, Any], path: Path) -> None:
    """Writes a ``random_state``; a disk that refuses is an OSError (torch's own writer makes it a RuntimeError)."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    path.write_bytes(buffer.getvalue())


def read_random_state(path: Path) -> dict[str, Any]:
    """What was written; nothing in it can run code."""
    return torch.load(path, weights_only=True)
