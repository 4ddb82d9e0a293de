"""What lives, what died, and what the dead left behind.

Every wait of one group also looks at the others (``death_elsewhere``): a driver that waits an hour for a rollout learns
within seconds that the reward model's process is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from hybridflow.single_controller.file_names import file_prefix
from hybridflow.single_controller.oom import OomKills

SHARED_MEMORY = Path("/dev/shm")
STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its stacks from a signal handler in C, also while native code holds the interpreter."""


class Mortal(Protocol):
    """A group whose processes can die."""

    def first_death(self) -> str | None:
        """What died, as text; None while all live."""
        ...

    def keep_stacks(self) -> object:
        """Writes the Python stacks of its processes where its stacks go."""
        ...


_live: weakref.WeakSet[Mortal] = weakref.WeakSet()


def enlist(group: Mortal) -> None:
    """From now on every wait of this driver notices deaths in ``group``."""
    _live.add(group)


def dismiss(group: Mortal) -> None:
    """``group`` is being shut down: its processes may go."""
    _live.discard(group)


def others(group: Mortal) -> list[Mortal]:
    """Live groups of this driver beside ``group``."""
    return [other for other in list(_live) if other is not group]


def death_elsewhere(group: Mortal) -> str | None:
    """What died in a live group other than ``group``, as text; None when nothing did."""
    for other in others(group):
        if (text := other.first_death()) is not None:
            return text
    return None


def exit_cause(code: int | None, before: OomKills | None = None, now: OomKills | None = None) -> str:
    """Why a process with this exit code (negative: signal number) ended, as text.

    ``before`` and ``now``: what the kernel counted on its node when it started and after it ended.
    """
    if code is None:
        return "its connection closed"
    if code == -signal.SIGKILL:
        return killed_cause(before, now)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def killed_cause(before: OomKills | None, now: OomKills | None) -> str:
    """Who sent a SIGKILL, as far as the kernel's counters tell."""
    rose = "unknown" if before is None or now is None else now.rose_since(before)
    if rose == "cgroup":
        limit = "the memory limit of its cgroup (container, pod, Slurm step) was reached"
        return f"killed by the kernel's out-of-memory killer: {limit}"
    if rose == "node":
        return "killed by SIGKILL while the kernel's out-of-memory killer ended processes of this node: out of memory"
    if rose is None:
        return "killed by SIGKILL from outside (kill -9, a scheduler): the kernel counted no out-of-memory kill"
    return "killed by SIGKILL (kill -9, or the out-of-memory killer: see dmesg)"


def log_cause(log: str) -> str | None:
    """The fatal error that the interpreter wrote into its log before a signal ended it; None: none."""
    return next((line for line in log.splitlines() if line.startswith("Fatal Python error: ")), None)


def descendants(pids: Iterable[int]) -> list[int]:
    """Processes of this machine that the given ones started, directly or not."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and its children are others' now
            found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return found


def kill(pids: Iterable[int], *, timeout_s: float = 5.0) -> list[int]:
    """Ends processes of this machine with SIGKILL; those that still live after ``timeout_s``."""
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; or it lives, which the answer says
            os.kill(pid, signal.SIGKILL)
    return wait_gone(pids, timeout_s=timeout_s)


def wait_gone(pids: Iterable[int], *, timeout_s: float) -> list[int]:
    """Waits until the processes are gone; those that still live after ``timeout_s``."""
    left = list(pids)
    until = time.monotonic() + timeout_s
    while (left := [pid for pid in left if _alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def remove_segments(pids: Sequence[int], ports: Sequence[int]) -> list[str]:
    """Removes shared-memory segments that ended processes left on this machine; their names.

    A segment belongs to them when its name has one of their pids or rendezvous ports as a number (torch names segments
    by pid, our vLLM engine by port) and no living process maps it.
    """
    owners = {str(number) for number in (*pids, *ports)}
    if not SHARED_MEMORY.is_dir():
        return []
    candidates = [path for path in SHARED_MEMORY.iterdir() if owners & set(re.findall(r"\d+", path.name))]
    removed = []
    for path in candidates:
        if not _mapped(str(path)):
            with contextlib.suppress(FileNotFoundError, PermissionError, IsADirectoryError):  # gone, or not ours
                path.unlink()
                removed.append(path.name)
    return removed


def _mapped(path: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended since, or is another user's, who cannot map our files
            if path.encode() in maps.read_bytes():
                return True
    return False


def last_lines(path: str, count: int = 20) -> str:
    """The last ``count`` lines of a log on this machine; empty when it cannot be read."""
    if not path:
        return ""
    with contextlib.suppress(OSError):  # what cannot be read is no reason to hide why it was asked for
        return "\n".join(Path(path).read_text(errors="replace").splitlines()[-count:])
    return ""


def answer_stack_signal() -> None:
    """This process writes its Python stacks at ``STACK_SIGNAL``, into a file that ``remove_segments`` finds."""
    if SHARED_MEMORY.is_dir():
        file = _stack_file(os.getpid()).open("w")  # stays open: the handler may not open files
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)


def stacks_by_signal(pid: int, *, timeout_s: float = 2.0) -> str:
    """Stacks of a process of this machine that does not answer otherwise; empty: it does not answer this way either."""
    file = _stack_file(pid)
    try:
        before = file.stat().st_size
        os.kill(pid, STACK_SIGNAL)
    except OSError:  # no such file: no handler, which the signal would end; or no such process
        return ""
    until, written = time.monotonic() + timeout_s, 0
    while time.monotonic() < until:
        time.sleep(0.1)
        found = file.read_bytes()[before:]
        if found and len(found) == written:
            return found.decode(errors="replace")
        written = len(found)
    return ""


def _stack_file(pid: int) -> Path:
    # by pid for ``remove_segments``, by prefix for the next group that finds what a dead tree left
    return SHARED_MEMORY / f"{file_prefix('stacks', pid)}{pid}"
