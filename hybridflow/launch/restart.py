"""Starting again after a worker died or hung: how often, after which wait, and what is said about it.

A try ends by an error of the kind that another try may not meet: a process or node that is gone (``LostError``), a wait
past its deadline (``DeadlineError``), and, once a node was lost, slots that the cluster lacks until another takes its
place (``ShortageError``). What a worker's code raises would be raised again and ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hybridflow.utils.errors import DeadlineError, LostError, ShortageError

logger = logging.getLogger(__name__)

T = TypeVar("T")
LONGEST_WAIT_S = 300.0
"""The doubling of waits ends here."""


def try_again(
    attempt: Callable[[], T],
    *,
    restarts: int,
    backoff_s: float,
    progress: Callable[[], int],
    stop_asked: Callable[[], bool],
    say: Callable[[str], None],
) -> T:
    """What ``attempt`` returns, called again after a loss, at most ``restarts`` times.

    Args:
        attempt: one try from start to end; has ended all that it started when it raises.
        restarts: how often it is called again.
        backoff_s: wait before a restart; doubled for each one that follows another without progress.
        progress: a number that changes when something was saved.
        stop_asked: whether the run was told to end: then nothing is started again.
        say: tells the person at the console.

    Raises:
        LostError, DeadlineError, ShortageError: the last try's, when no restart is left.
    """
    fruitless = 0
    for number in range(1, restarts + 2):
        saved = progress()
        retried = (LostError, DeadlineError, ShortageError) if number > 1 else (LostError, DeadlineError)
        try:
            return attempt()
        except retried:
            if number > restarts or stop_asked():
                raise
        fruitless = 0 if progress() != saved else fruitless + 1
        wait_s = min(backoff_s * 2 ** max(0, fruitless - 1), LONGEST_WAIT_S)
        say(f"restart {number} of {restarts} (trainer.max_restarts) in {wait_s:g} s, from {_from(progress())}")
        time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


@contextmanager
def told_at_once() -> Iterator[None]:
    """Logs a loss when it is noticed: what ends the try behind it takes seconds."""
    try:
        yield
    except (LostError, DeadlineError, ShortageError) as error:
        logger.error("%s", error)
        raise


def _from(step: int) -> str:
    return f"the checkpoint of step {step}" if step else "where this command began"
