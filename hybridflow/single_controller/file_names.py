"""Names of files that processes share in memory, from which anybody can tell whether their process still lives."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import socket
from pathlib import Path


def file_prefix(kind: str, pid: int) -> str:
    """How the names of a process's files of this kind (one word of letters) start."""
    return f"hybridflow-{kind}-{machine_letters()}-{letters_of(pid)}-"


def owners_of_files(folder: Path) -> dict[Path, int]:
    """Pid by file of every file there, of any kind, that a process of this machine made."""
    return {path: number_of(path.name.split("-")[3]) for path in folder.glob(f"hybridflow-*-{machine_letters()}-*")}


@functools.cache
def machine_letters() -> str:
    """Where a pid means this process: host, boot and pid namespace, as letters; containers may share the folders."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not on Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return letters_of(int.from_bytes(hashlib.blake2s("|".join(parts).encode(), digest_size=4).digest(), "big"))


def letters_of(number: int) -> str:
    """A number without digits: ``health.remove_segments`` takes numbers in a name for pids and ports."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def number_of(letters: str) -> int:
    """What ``letters_of`` wrote."""
    return int("".join(str(ord(letter) - ord("a")) for letter in letters))
