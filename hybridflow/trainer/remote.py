"""A second home of checkpoints: any file system that fsspec knows (s3://, gs://, hdfs://, memory://, file://).

A complete checkpoint is copied file by file, its manifest last: a remote folder with a manifest is complete. A run
whose own folder lacks the newest one (another machine, an emptied disk) fetches it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from hybridflow.utils.background import in_background
from hybridflow.utils.errors import ConfigError, MachineError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RemoteError(MachineError):
    """The other file system refuses; checkpoints in the run's own folder are not concerned."""


class RemoteFolder:
    """A folder of checkpoints on any file system.

    Args:
        url: as fsspec takes it; created at the first copy.
        key: the option that names it, for errors.
        deadline_s: how long a look, or a fetch, may take (``trainer.timeouts.save_s``). Copies are made in the
            background of a save, which has the deadline.

    Raises:
        ConfigError: no such protocol, or its package is not installed.
        RemoteError: the file system refuses.
    """

    def __init__(
        self, url: str, *, key: str = "trainer.checkpoint_copy", deadline_s: float = threading.TIMEOUT_MAX
    ) -> None:
        self.url = url
        self._key = key
        self._deadline_s = deadline_s
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{key}={url}: {error}") from error
        except Exception as error:  # every backend has errors of its own
            raise RemoteError(f"{key}={url} cannot be reached: {type(error).__name__}: {error}") from error

    def push(self, folder: Path, *, last: str) -> None:
        """Copies the files of a complete checkpoint, ``last`` behind all others.

        Raises:
            RemoteError: the file system refuses.
        """
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        target = f"{self._root}/{folder.name}"

        def copy() -> None:
            if self._files.exists(target):  # of a run that was given up, or cut short
                self._files.rm(target, recursive=True)
            for name in [*(name for name in names if name != last), last]:
                self._files.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(folder / name), f"{target}/{name}")

        self._reach(copy)

    def pull(self, name: str, into: Path) -> None:
        """Fetches the checkpoint ``name`` into the folder ``into``, which appears complete or not at all."""
        partial = into.with_name(into.name + ".partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        source = f"{self._root}/{name}"

        def fetch() -> None:
            found = self._files.find(source)
            if not found:
                raise FileNotFoundError(f"there is no {source}")
            for path in found:
                target = partial / os.path.relpath(path, source)
                if not target.resolve().is_relative_to(partial.resolve()):
                    raise OSError(f"{path} would be written outside {partial}")
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(path, str(target))

        self._in_time(f"{name} was not fetched", fetch)
        os.replace(partial, into)

    def complete(self, *, last: str) -> dict[str, dict[str, Any]]:
        """Manifest by name of every complete checkpoint there; one that cannot be read is left out with a warning."""

        def look() -> dict[str, bytes]:
            if not self._files.exists(self._root):
                return {}
            names = [path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
            held = [name for name in names if self._files.exists(f"{self._root}/{name}/{last}")]
            return {name: self._files.cat_file(f"{self._root}/{name}/{last}") for name in held}

        manifests = {}
        for name, text in self._in_time("what it holds was not told", look).items():
            try:
                manifests[name] = dict(json.loads(text))
            except (ValueError, TypeError) as error:
                logger.warning("%s/%s is left out: its %s is damaged: %r", self.url, name, last, error)
        return manifests

    def set_aside(self, name: str, marked: str) -> None:
        """Renames a checkpoint there to ``name`` + ``marked`` + the first free number."""

        def rename() -> None:
            number = 1
            while self._files.exists(aside := f"{self._root}/{name}{marked}{number}"):
                number += 1
            self._files.mv(f"{self._root}/{name}", aside, recursive=True)

        self._reach(rename)

    def remove(self, name: str) -> None:
        """Removes a checkpoint there, or what there is of it."""

        def remove() -> None:
            if self._files.exists(target := f"{self._root}/{name}"):
                self._files.rm(target, recursive=True)

        self._reach(remove)

    def _in_time(self, what: str, action: Callable[[], T]) -> T:
        """The result of ``action``; one that passes the deadline is left behind, whatever its backend waits for."""
        going = in_background("fetch", self._reach, action)
        try:
            return going.result(self._deadline_s)
        except TimeoutError as error:
            raise RemoteError(
                f"{self._key}: {what} from {self.url} within {self._deadline_s:g} s (trainer.timeouts.save_s): the "
                "file system does not answer, or the checkpoint needs longer"
            ) from error

    def _reach(self, action: Callable[[], T]) -> T:
        try:
            self._files.invalidate_cache()
            return action()
        except Exception as error:  # every backend has errors of its own
            raise RemoteError(f"{self.url} cannot be used: {type(error).__name__}: {error}") from error
