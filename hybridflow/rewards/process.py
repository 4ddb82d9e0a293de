"""A killable process that runs reward functions (the parent's end of rewards/child.py).

Linux ends such a child when the *thread* that started it ends (PR_SET_PDEATHSIG), so all of them are started by one
thread that lives as long as this process.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.rewards.result import RewardError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Deadline of a child's start, in which the user's file and what it imports are loaded."""
ASYNC_CALLS = 256
"""Calls of an async function that one process awaits at a time."""
_KILLED_S = 10.0
"""How long the kernel may take to end a killed child before that is said, and it is left behind."""
_GRACE_S = 1.0
"""An async call's deadline is kept inside the child; its process is ended only when that did not happen."""


class RewardProcess:
    """One child and the calls that it is working on.

    Raises:
        RewardError: the reward function could not be loaded there; carries the traceback.
    """

    def __init__(self, config: RewardConfig, scorers: Sequence[str] = ()) -> None:
        self.connection, far = multiprocessing.Pipe()
        self._timeout_s = config.timeout_s
        self._process: subprocess.Popen[bytes] = _starter().submit(_start, far.fileno(), scorers).result()
        far.close()
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-sender")
        self.running: dict[int, float] = {}
        """Number of a call to the time at which it is overdue."""
        try:
            self.connection.send(config)
            self._concurrent = self._await_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def capacity(self) -> int:
        """Further calls that it can take now."""
        return (ASYNC_CALLS if self._concurrent else 1) - len(self.running)

    def submit(self, number: int, sample: Mapping[str, Any]) -> None:
        """Starts a call; its deadline runs from now."""
        grace = _GRACE_S if self._concurrent else 0.0
        self.running[number] = time.monotonic() + self._timeout_s + grace
        self._sender.submit(self._send, pickle.dumps((number, dict(sample))))

    def kill(self) -> None:
        """Ends the child and what it started, now."""
        # A child that has just ended may have taken its process group with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            logger.error("reward process %d was killed and does not end: it waits in the kernel", self._process.pid)
        # What the child has started in a session of its own may hold its end open: the sender must not wait for that.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)
        self._sender.shutdown(wait=True, cancel_futures=True)
        self.connection.close()

    @property
    def has_ended(self) -> bool:
        """Whether the child is gone."""
        return self._process.poll() is not None

    def await_end(self) -> int:
        """Exit code of a child that has closed its end; a signal counts negative."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its end and lives on: it is ended below
            return self._process.wait(_GRACE_S)
        self.kill()
        return self._process.wait(_KILLED_S)

    def _send(self, message: bytes) -> None:
        # In a thread of its own: a child that holds the interpreter lock reads nothing, and a full socket would then
        # keep the caller from ever seeing the deadline. A child that is gone shows on the receiving side.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def _await_ready(self) -> bool:
        if not self.connection.poll(START_TIMEOUT_S):
            raise RewardError(f"the reward process did not start in {START_TIMEOUT_S:g} s")
        try:
            word, *rest = self.connection.recv()
        except (EOFError, OSError) as error:
            raise RewardError(f"the reward process ended at its start (exit code {self.await_end()})") from error
        if word != "ready":
            cause, trace = rest
            raise RewardError(f"the reward function could not be loaded: {cause}\n{trace}")
        return rest[0]


def _start(fd: int, scorers: Sequence[str]) -> subprocess.Popen[bytes]:
    # What this process can import, the child can, but the standard library comes first there: the script's own folder,
    # first here, may hold a reward file called math.py. -P leaves the working directory out likewise.
    folders = [entry or str(Path.cwd()) for entry in sys.path]
    program = (
        f"import sys; sys.path += [folder for folder in {folders!r} if folder not in sys.path]; "
        f"from hybridflow.rewards.child import main; main({fd}, {os.getpid()}, {list(scorers)!r})"
    )
    command = [sys.executable, "-P", "-c", program]
    return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True)


@cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-starter")
