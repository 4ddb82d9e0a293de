"""Where a training role's state is while it works and while it waits (GPU; on CPU nothing moves)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hybridflow.config.model import FSDPConfig
from hybridflow.engines.train.base import TrainEngine


@contextmanager
def resident(engine: TrainEngine, sharding: FSDPConfig) -> Iterator[None]:
    """Keeps what ``param_offload`` and ``optimizer_offload`` name on the device inside, in host memory outside."""
    moved = [
        what
        for what, wanted in (("parameters", sharding.param_offload), ("optimizer", sharding.optimizer_offload))
        if wanted
    ]
    engine.onload(moved)
    try:
        yield
    finally:
        engine.offload(moved)
