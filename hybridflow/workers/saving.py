"""What a trained role puts into its folder of a checkpoint, and the calls that do it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hybridflow.config.model import CheckpointContentsConfig, FSDPConfig
from hybridflow.dispatch.register import register
from hybridflow.engines.train.base import TrainEngine
from hybridflow.workers.residence import resident
from hybridflow.workers.skips import Skips

EXPORT = "huggingface"
"""Folder of the exported model inside the role's."""
EXTRA = "extra"
"""Content of a checkpoint: what is neither weights nor moments."""


def begin_save(engine: TrainEngine, folder: str, config: CheckpointContentsConfig) -> None:
    """Writes what ``config`` names into ``folder``, or with ``async_save`` begins to. Collective.

    The Hugging Face export gathers whole tensors and is always written before this returns.
    """
    if "hf_model" in config.save_contents:
        engine.save_hf(str(Path(folder) / EXPORT))
    contents = [content for content in config.save_contents if content != "hf_model"]
    if contents:
        engine.save(folder, contents=contents, background=config.async_save)


class TrainedWorker:
    """A worker with an engine that is trained, saved, restored and measured; base of actor and critics."""

    engine: TrainEngine
    _sharding: FSDPConfig
    _checkpoint: CheckpointContentsConfig
    _skips: Skips

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Has the devices for this role inside."""
        with resident(self.engine, self._sharding):
            yield

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes of parameters, gradients and optimizer state on this rank."""
        return self.engine.held_bytes()

    @register(dispatch="ONE_TO_ALL")
    def save_checkpoint(self, folder: str) -> None:
        """Writes what ``checkpoint.save_contents`` names, or begins to."""
        with self.at_work():
            begin_save(self.engine, folder, self._checkpoint)
        if EXTRA in self._checkpoint.save_contents:
            self._skips.save(Path(folder))

    @register(dispatch="ONE_TO_ALL")
    def checkpoint_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self.engine.saved()

    @register(dispatch="ONE_TO_ALL")
    def finish_checkpoint(self) -> None:
        """Completes a save in the background."""
        self.engine.finish_save()

    @register(dispatch="ONE_TO_ALL")
    def load_checkpoint(self, folder: str) -> None:
        """Restores what ``checkpoint.load_contents`` names."""
        with self.at_work():
            self.engine.load(folder, contents=self._checkpoint.load_contents)
        if EXTRA in self._checkpoint.load_contents:
            self._skips.load(Path(folder))
