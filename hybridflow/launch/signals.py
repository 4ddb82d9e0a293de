"""SIGTERM and SIGINT: the first asks the run to save and end after its step, the second ends everything at once.

Exit codes are those of shells, 128 + signal: 143 for SIGTERM, 130 for SIGINT. Schedulers send SIGTERM some time before
SIGKILL; that time must cover one step and one checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from hybridflow.single_controller import health

logger = logging.getLogger(__name__)

HANDLED = (signal.SIGTERM, signal.SIGINT)
_SHOW_CURSOR = "\x1b[?25h"


class Interrupted(BaseException):
    """A signal came before there was a step to finish; like KeyboardInterrupt no ordinary handler takes it."""


class StopSignals:
    """Handlers of this process while inside; outside the main thread, where Python allows none, it does nothing.

    Until ``arm`` the first signal raises ``Interrupted``, so that whatever has started is ended in order.

    Args:
        saves: whether the run saves before it ends, for what the person is told.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self._what = "is finished and saved" if saves else "is finished, and not saved (trainer.save_freq)"
        self.received: int | None = None
        """The first signal that came."""
        self._armed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in HANDLED} if _in_main_thread() else {}
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From here on the first signal only asks. Installs the handlers again: Ray's start puts its own there."""
        self._armed = True
        self._install()

    def disarm(self) -> None:
        """A try ended: until the next ``arm`` a signal ends the run at once, in order."""
        self._armed = False
        self._install()

    def asked(self) -> bool:
        """Whether a signal came."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal that came."""
        assert self.received is not None
        return 128 + self.received

    def _install(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            _end_all(128 + number)
        self.received = number
        name = signal.Signals(number).name
        if not self._armed:
            raise Interrupted(name)
        logger.warning("%s: this step %s, then the run ends; a second signal ends it at once", name, self._what)


def _end_all(code: int) -> None:
    """Kills every process that this one started, and leaves without any clean-up that could wait."""
    children = health.descendants([os.getpid()])
    health.kill(children, timeout_s=2.0)
    health.remove_segments(children, [])
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR.encode())  # a live progress line hides it
    os._exit(code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
