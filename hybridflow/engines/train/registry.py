"""Training engines by ``strategy``; ``utils.optional.load`` resolves them, so that a name costs no import."""

from __future__ import annotations

TRAIN_ENGINES: dict[str, str] = {
    "fsdp": "hybridflow.engines.train.fsdp:FSDPEngine",
    "fsdp2": "hybridflow.engines.train.fsdp:FSDPEngine",
}
