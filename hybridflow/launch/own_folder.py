"""One run at a time in a folder: two would remove each other's unfinished checkpoints and mix their metrics.

A lock of the kernel, so that it goes with the process that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hybridflow.utils.errors import MachineError

logger = logging.getLogger(__name__)

LOCK = "run.lock"


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Inside, no other run has ``folder``, which is made. A file system without locks gives a warning.

    Raises:
        MachineError: another run has it, says which; or it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise MachineError(f"trainer.default_local_dir={folder} cannot be written to: {error}") from error
    with file:
        _lock(file, folder)
        yield


def _lock(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise MachineError(
            f"another run ({file.read().strip() or 'unknown'}) writes to trainer.default_local_dir={folder}. Wait for "
            "its end, or give this one a folder of its own (another trainer.experiment_name does)"
        ) from error
    except OSError as error:
        logger.warning("%s cannot be locked (%s): see that no other run writes to it", folder, error)
    file.truncate(0)
    with suppress(OSError):  # a full disk: the lock holds without the note of who has it
        file.write(f"node {socket.gethostname()}, pid {os.getpid()}\n")
        file.flush()
