"""Log lines that say who speaks: ``12:30:05 WARNING actor[3] hybridflow.engines: text``.

Library code asks for ``logging.getLogger(__name__)``; a process calls ``set_up`` once, at its start.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)s {speaker}%(name)s: %(message)s"
_seen: set[tuple[str, str]] = set()


class _ToStderr(logging.Handler):
    """Writes to what stderr is at that time: while a live line stands on the terminal, the writer of lines above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        print(self.format(record), file=sys.stderr, flush=True)


def set_up(*, role: str | None = None, rank: int | None = None, level: int | str = logging.INFO) -> None:
    """Sends the log of ``hybridflow`` to stderr, once per process; a second call replaces role, rank and level.

    Other libraries' loggers are left as they are. ``role`` and ``rank`` name a worker; the driver gives neither.
    """
    speaker = "" if role is None else f"{role} " if rank is None else f"{role}[{rank}] "
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter(_FORMAT.format(speaker=speaker), datefmt="%H:%M:%S"))
    logger = logging.getLogger("hybridflow")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)


def warn_once(logger: logging.Logger, message: str, *, key: str | None = None) -> None:
    """Warns the first time that ``key`` (default: the message) is seen by this logger in this process."""
    mark = (logger.name, key if key is not None else message)
    if mark not in _seen:
        _seen.add(mark)
        logger.warning(message)
