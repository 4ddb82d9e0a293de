"""The process that runs reward functions, so that its parent can end a call that does not come back.

Started by rewards/process.py with a socket, its parent's id and the scorers to import before it is ready. It says
``("ready", is_async)`` once, then answers every ``(number, sample)`` with ``(number, outcome)``. Calls of an async
function run concurrently; calls of a plain one, one at a time in the main thread, so that functions which use signals
work. What functions print goes to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

from hybridflow.config.reward import RewardConfig
from hybridflow.rewards.registry import RewardFunction, is_async, load_reward_function
from hybridflow.rewards.result import STEP_REWARDS, as_score
from hybridflow.utils.optional import load

Outcome = tuple[Literal["scored"], float, dict[str, Any]] | tuple[Literal["raised", "no score"], str, str]
"""Score and further entries; or what was raised (or returned in place of a score), with its traceback."""

_PLAIN = (bool, int, float, str, type(None))
_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int, scorers: Sequence[str]) -> None:
    """Serves calls until the parent closes the socket or dies."""
    _die_with(parent)
    connection = Connection(fd)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config: RewardConfig = connection.recv()
    try:
        function = load_reward_function(config)
        for target in scorers:
            load(target)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary to the user's code; the parent raises it
        connection.send(("failed", _first_line(error), traceback.format_exc()))
        return
    concurrent = is_async(function)
    connection.send(("ready", concurrent))
    if concurrent:
        asyncio.run(_serve_concurrently(function, connection, config.timeout_s))
    else:
        _serve(function, connection)


def _serve(function: RewardFunction, connection: Connection) -> None:
    while True:
        try:
            number, sample = connection.recv()
        except EOFError:
            return
        connection.send((number, outcome_of_call(function, sample)))


async def _serve_concurrently(function: RewardFunction, connection: Connection, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, sample: Mapping[str, Any]) -> None:
        connection.send((number, await _call_async(function, sample, timeout_s)))

    while True:
        try:
            number, sample = await loop.run_in_executor(None, connection.recv)
        except EOFError:
            os._exit(0)  # calls that still run have nobody to answer to
        task = loop.create_task(answer(number, sample))
        tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(tasks.discard)


def outcome_of_call(function: RewardFunction, sample: Mapping[str, Any]) -> Outcome:
    """What came of one call in this process; whatever it raises becomes an outcome."""
    try:
        returned = function(**sample)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary to the user's code
        return _raised(error)
    return _judged(returned)


async def _call_async(function: RewardFunction, sample: Mapping[str, Any], timeout_s: float) -> Outcome:
    try:
        returned = await asyncio.wait_for(function(**sample), timeout_s)
    except TimeoutError as error:
        return ("raised", f"no answer in {timeout_s:g} s", "") if not error.args else _raised(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary to the user's code
        return _raised(error)
    return _judged(returned)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _judged(returned: Any) -> Outcome:
    try:
        score, extra = as_score(returned)
        return ("scored", score, {key: value if key == STEP_REWARDS else _plain(value) for key, value in extra.items()})
    except TypeError as error:
        return ("no score", str(error), "")
    except ValueError as error:
        return ("raised", str(error), "")
    except Exception as error:  # noqa: BLE001  the boundary to the user's types: their ``item``, ``str`` and ``repr``
        return _raised(error)


def _raised(error: BaseException) -> Outcome:
    return ("raised", f"raised {_first_line(error)}", "".join(traceback.format_exception(error)))


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _plain(value: Any) -> Any:
    """The entry, or its repr where the parent could not unpickle it: it may not have the user's types."""
    return value if type(value) in _PLAIN else repr(value)


def _die_with(parent: int) -> None:
    """Asks Linux to end this process when its parent ends, even inside a call that never returns to Python.

    Elsewhere the closed socket ends it as soon as the running call comes back.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit(1)
