"""One run at a time in a folder: two would remove each other's unfinished checkpoints and mix their metrics.

A lock of the kernel, so that it goes with the process that holds it, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybridflow.utils.errors import MachineError

logger = logging.getLogger(__name__)

LOCK = "run.lock"


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Inside, no other run has ``folder``, which is made. A file system without locks gives a warning.

    Raises:
        MachineError: another run has it, says which; or it cannot be written to.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not for writing where that will do: a disk with such a file cannot be made read-only.
        file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    except OSError as error:
        raise MachineError(f"trainer.default_local_dir={folder} cannot be written to: {error}") from error
    try:
        if not _locked(file, path):
            os.close(file)
            file = os.open(path, os.O_RDWR)
            _locked(file, path)
        with suppress(OSError):  # a full disk: the lock holds without the note of who has it
            path.write_text(f"node {socket.gethostname()}, pid {os.getpid()}\n")
        yield
    finally:
        os.close(file)


def _locked(file: int, path: Path) -> bool:
    """False where only a file that is open for writing can be locked (NFS)."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise MachineError(
            f"another run ({path.read_text().strip() or 'unknown'}) writes to trainer.default_local_dir={path.parent}. "
            "Wait for its end, or give this one a folder of its own (another trainer.experiment_name does)"
        ) from error
    except OSError as error:
        if error.errno == errno.EBADF:
            return False
        logger.warning("%s cannot be locked (%s): see that no other run writes there", path, error)
    return True
