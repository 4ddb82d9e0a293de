"""What a trained role puts into its folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config.model import CheckpointContentsConfig
from hybridflow.engines.train.base import TrainEngine

EXPORT = "huggingface"
"""Folder of the exported model inside the role's."""


def begin_save(engine: TrainEngine, folder: str, config: CheckpointContentsConfig) -> None:
    """Writes what ``config`` names into ``folder``, or with ``async_save`` begins to. Collective.

    The Hugging Face export gathers whole tensors and is always written before this returns.
    """
    if "hf_model" in config.save_contents:
        engine.save_hf(str(Path(folder) / EXPORT))
    contents = [content for content in config.save_contents if content != "hf_model"]
    if contents:
        engine.save(folder, contents=contents, background=config.async_save)
