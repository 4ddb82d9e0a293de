"""What ranks of one machine keep for one another: a file in shared memory per object.

A consumer maps the file, so no rank serves another and the producer is never interrupted. The driver, which alone knows
who still needs an object, removes its file. A name holds the producer's machine and pid, so that what the dead leave is
found: by the driver when a rank dies, by the ranks when the driver dies, by the next group when all died at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from hybridflow.batch.refs import Bytes, Kept
from hybridflow.single_controller import health
from hybridflow.single_controller.file_names import file_prefix, letters_of, owners_of_files
from hybridflow.single_controller.health import SHARED_MEMORY
from hybridflow.utils.errors import LostError

KIND = "kept"
_numbers = itertools.count()
"""Of the objects of this process, whatever store keeps them: their names must differ."""


class Segment(Kept):
    """An object in a file; ``token`` is its path.

    Args:
        before_read: called with this reference before each read; may refuse by raising.
    """

    def __init__(self, token: str, size: int, owner: str, before_read: Callable[[Kept], None] | None = None) -> None:
        super().__init__(token, size, owner)
        self._before_read = before_read

    def read(self) -> Bytes:
        """See ``Kept.read``."""
        if self._before_read is not None:
            self._before_read(self)
        try:
            return np.memmap(self.token, dtype=np.uint8, mode="r")
        except FileNotFoundError as error:
            raise LostError(f"rows are lost: they were kept by {self.owner}, which is gone") from error


class SegmentStore:
    """Objects that this process keeps.

    Args:
        owner: who this process is, for errors.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def put(self, data: Bytes) -> Kept:
        """See ``Store.put``. Falls back to the temporary folder when shared memory is full."""
        name = f"{file_prefix(KIND, os.getpid())}{letters_of(next(_numbers))}"
        folders = _folders()
        for folder in folders:
            path = folder / name
            try:
                _write(path, data)
            except OSError as error:
                path.unlink(missing_ok=True)
                if error.errno != errno.ENOSPC or folder == folders[-1]:
                    raise
            else:
                return Segment(str(path), data.size, self._owner)
        raise AssertionError("unreachable: the last folder raises")

    def open(self, token: str, size: int, owner: str) -> Kept:
        """See ``Store.open``."""
        return Segment(token, size, owner)


class SegmentTable:
    """The driver's references: an object's file is removed with the last of them. Any thread may use it."""

    def __init__(self) -> None:
        self._held: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()

    def hold(self, token: str, size: int, owner: str, before_read: Callable[[Kept], None]) -> Kept:
        """The reference to this file: the one that exists, or a new one."""
        segment = self._held.get(token)
        if segment is None:
            segment = self._held[token] = Segment(token, size, owner, before_read)
            weakref.finalize(segment, _remove, token)
        return segment


def segments_of(pids: Iterable[int]) -> list[Path]:
    """Files of what these processes of this machine keep."""
    return [path for pid in pids for folder in _folders() for path in folder.glob(f"{file_prefix(KIND, pid)}*")]


def remove_segments_of(pids: Iterable[int]) -> None:
    """Removes what these processes of this machine kept; references to it are lost."""
    for path in segments_of(pids):
        _remove(str(path))


def remove_segments_of_the_dead() -> None:
    """Removes files of any kind of processes that are gone, and whose group could not clean up behind them."""
    owners = {path: pid for folder in _folders() for path, pid in owners_of_files(folder).items()}
    alive = set(health.wait_gone(set(owners.values()), timeout_s=0.0))
    for path, pid in owners.items():
        if pid not in alive:
            _remove(str(path))


def _write(path: Path, data: Bytes) -> None:
    """A file of this user's own: others can neither read it nor have put something in its place."""
    _remove(str(path))  # of an earlier process with our pid
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(data.data)


def _folders() -> list[Path]:
    temporary = Path(tempfile.gettempdir())
    return [SHARED_MEMORY, temporary] if os.access(SHARED_MEMORY, os.W_OK) else [temporary]


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):  # gone already, or of another user
        Path(path).unlink()
