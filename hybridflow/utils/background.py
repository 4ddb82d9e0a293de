"""Work that goes on beside its caller and never keeps a process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """The future result of ``function`` in a daemon thread called ``name``.

    A pool's threads would be joined when the interpreter exits: one that is stuck on a disk or a network would keep the
    process for ever.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
