"""Whether the kernel's out-of-memory killer was at work: counters of this process's cgroup and of its node.

A killed process cannot say why. The kernel counts its victims by cgroup (version 1 and 2) and by node: a counter that
rose between a rank's start and its SIGKILL tells the two kinds of SIGKILL apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """Processes that the out-of-memory killer ended so far; None: the kernel does not say."""

    cgroup: int | None
    node: int | None

    def rose_since(self, before: OomKills) -> str | None:
        """``cgroup`` or ``node``, whichever rose and says more; None: neither did; ``unknown``: neither is known."""
        pairs = {"cgroup": (before.cgroup, self.cgroup), "node": (before.node, self.node)}
        known = {name: (old, new) for name, (old, new) in pairs.items() if old is not None and new is not None}
        if not known:
            return "unknown"
        return next((name for name, (old, new) in known.items() if new > old), None)


def oom_kills(root: Path = Path("/")) -> OomKills:
    """Both counters now.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    cgroup = next((count for path in _cgroup_files(root) if (count := _count(path)) is not None), None)
    return OomKills(cgroup=cgroup, node=_count(root / "proc/vmstat"))


def _cgroup_files(root: Path) -> Iterator[Path]:
    """Where the count of this process's cgroup may stand; inside a container its own path is often the mount's root."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for _, controllers, path in entries:
        for place in (path.lstrip("/"), ""):
            if "memory" in controllers.split(","):
                yield mount / "memory" / place / "memory.oom_control"
            elif not controllers:
                yield mount / place / "memory.events"
                yield mount / "unified" / place / "memory.events"


def _count(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
