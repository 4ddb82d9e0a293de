"""Workers that the tests of groups call; imported by their processes."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.batch.batch import Batch
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.utils.errors import ConfigError


class Unreadable:
    """Can be pickled only."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


class Echo:
    """Returns what it sees."""

    def __init__(self, context: RankContext, *, offset: int = 0, threads_seen: bool = True) -> None:
        self.context = context
        self.offset = offset
        self.built_in = threading.get_ident()
        self.history: list[str] = []

    @register(dispatch="DP_COMPUTE", reads=("x",), writes=("y",))
    def shift(self, batch: Batch, *, by: int = 1) -> tuple[Batch, Mapping[str, float]]:
        """Adds y = x + by, and the sum of the valid x over all ranks."""
        total = (batch["x"] * batch["valid"]).sum().double()
        dist.all_reduce(total)
        return Batch({"y": batch["x"] + by + self.offset}), {"sum": total.item(), "rows": len(batch)}

    @register(dispatch="ONE_TO_ALL")
    def note(self, word: str, *, seconds: float = 0.0) -> list[str]:
        """Remembers a word; all words so far."""
        time.sleep(seconds)
        self.history.append(word)
        return self.history

    @register(dispatch="ONE_TO_ALL")
    def whoami(self) -> dict[str, object]:
        """Where this rank runs."""
        return {
            "rank": self.context.rank,
            "world": dist.get_world_size(),
            "pid": os.getpid(),
            "same_thread": threading.get_ident() == self.built_in,
            "siblings": sorted(self.context.siblings),
            "threads": torch.get_num_threads(),
        }

    @register(dispatch="ONE_TO_ALL")
    def variables(self, *names: str) -> list[str | None]:
        """Environment of this rank."""
        return [os.environ.get(name) for name in names]

    @register(dispatch="ONE_TO_ALL")
    def torch_came_after(self) -> bool:
        """Whether torch read the thread count that the group set."""
        return torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])

    @register(dispatch="RANK_ZERO")
    def drain(self) -> list[object]:
        """Messages in the mailbox."""
        return self.context.mailbox.drain()

    @register(dispatch="RANK_ZERO", blocking=True)
    def first(self) -> int:
        """Rank of who was called."""
        return self.context.rank

    @register(dispatch="MESH_3D")
    def fail(self, *, rank: int) -> None:
        """Raises on one rank while the others wait in a collective; rank -1: on all."""
        if rank in (-1, self.context.rank):
            raise ConfigError("this rank was told to fail")
        dist.barrier()

    @register(dispatch="ONE_TO_ALL")
    def leave(self) -> None:
        """Calls sys.exit."""
        sys.exit(3)

    @register(dispatch="ONE_TO_ALL")
    def unpicklable(self) -> object:
        """Something that cannot travel."""
        return threading.Lock()

    @register(dispatch="ONE_TO_ALL")
    def unreadable(self) -> object:
        """Something that travels, and cannot be read where it arrives."""
        return Unreadable()

    @register(dispatch="ONE_TO_ALL")
    def doze(self, *, seconds: float, rank: int = -1) -> None:
        """Sleeps in the work lane."""
        if rank in (-1, self.context.rank):
            time.sleep(seconds)

    @register(dispatch="ONE_TO_ALL")
    def hog(self, *, rank: int, cgroup: str = "", numbers: int = 1 << 30) -> None:
        """Takes more memory (4 bytes a number) than its cgroup, or its node, may have; the others wait for it."""
        if self.context.rank == rank:
            if cgroup:
                with open(f"{cgroup}/cgroup.procs", "w") as file:
                    file.write(str(os.getpid()))
            self.hoarded = torch.ones(numbers)
            time.sleep(60.0)
        dist.barrier()

    @register(dispatch="ONE_TO_ALL")
    def crash(self, *, rank: int) -> None:
        """Reads from address 0, while the others wait for it."""
        if self.context.rank == rank:
            ctypes.string_at(0)
        dist.barrier()

    @register(dispatch="ONE_TO_ALL")
    def hold_interpreter(self, *, rank: int) -> None:
        """Stays in native code without ever giving up the interpreter lock."""
        if rank == self.context.rank:
            re.match(r"(a+)+$", "a" * 60 + "b")

    @register(dispatch="ONE_TO_ALL")
    def meet(self, *, late: int, seconds: float) -> None:
        """Meets the other ranks in a barrier, on rank ``late`` only after ``seconds``."""
        if self.context.rank == late:
            time.sleep(seconds)
        dist.barrier()

    @register(dispatch="ONE_TO_ALL")
    def kill_self(self, *, rank: int) -> None:
        """kill -9 on itself, while the others wait for it."""
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


class Wide:
    """Makes wide columns and reads them."""

    def __init__(self, context: RankContext) -> None:
        self.rank = context.rank

    @register(dispatch="DP_COMPUTE", reads=("x",), writes=("wide", "other"))
    def make(self, batch: Batch) -> Batch:
        """``wide``, ``[b, 100 + rank]``: x in every place."""
        wide = batch["x"][:, None].repeat(1, 100 + self.rank)
        return Batch({"wide": wide, "other": -wide.double(), "maker": torch.full((len(batch),), self.rank)})

    @register(dispatch="DP_COMPUTE", reads=("wide",), writes=("total",))
    def add_up(self, batch: Batch) -> Batch:
        """Sums of ``wide``, ``[b]``."""
        return Batch({"total": (batch["wide"] * batch["valid"][:, None]).sum(1)})

    @register(dispatch="ONE_TO_ALL")
    def owned(self) -> int:
        """Objects that this process keeps in Ray's store."""
        import ray

        return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())

    @register(dispatch="ONE_TO_ALL")
    def kill_self(self, *, rank: int) -> None:
        """kill -9 on itself."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)


class Sibling:
    """A second role of the same process."""

    def __init__(self, context: RankContext) -> None:
        self.echo: Echo = context.siblings["echo"]

    @register(dispatch="ONE_TO_ALL")
    def words(self) -> list[str]:
        """What the other role remembers."""
        return self.echo.history


class Broken:
    """Cannot be built."""

    def __init__(self, context: RankContext) -> None:
        raise ValueError("no such model")

    @register(dispatch="ONE_TO_ALL")
    def never(self) -> None:
        """Is never reached."""


class Slow:
    """Takes its time to be built."""

    def __init__(self, context: RankContext, *, seconds: float) -> None:
        time.sleep(seconds)

    @register(dispatch="ONE_TO_ALL")
    def done(self) -> bool:
        """True."""
        return True


class Closing:
    """Writes a file when it is closed."""

    def __init__(self, context: RankContext, *, path: str) -> None:
        self.path = f"{path}.{context.rank}"

    @register(dispatch="ONE_TO_ALL")
    def nothing(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Leaves a mark."""
        with open(self.path, "w") as file:
            file.write("closed")


class Rows:
    """Counts the rows it got."""

    def __init__(self, context: RankContext) -> None:
        self.rows = 0

    @register(dispatch="MESH_3D")
    def mine(self, batch: Batch) -> Batch:
        """The rows of this rank."""
        self.rows = len(batch)
        return batch

    @register(dispatch="ONE_TO_ALL")
    def counts(self) -> int:
        """Rows of the last call."""
        return self.rows


class Server:
    """A generator that must hold weights of a version before it serves."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.version: int | None = None

    @register(dispatch="ONE_TO_ALL")
    def hold(self, version: int) -> int:
        """Takes weights; the pid of this rank."""
        self.version = version
        return os.getpid()

    @register(dispatch="MESH_3D", reads=("x",), writes=("y",))
    def serve(self, batch: Batch, *, seconds: float = 0.0) -> Batch:
        """y = 1000 * version + x."""
        if self.version is None:
            raise ConfigError("asked to serve without weights")
        time.sleep(seconds)
        return Batch({"y": 1000 * self.version + batch["x"]})

    @register(dispatch="MESH_3D", reads=("x",), writes=("y",))
    def serve_in_steps(
        self, batch: Batch, *, steps: int, seconds: float, stuck: str = "", waits_s: float = 0.0
    ) -> Batch:
        """The same, in steps of ``seconds``, with a wait for others between; hangs for good once it made ``stuck``."""
        with self.context.pulse.expected():
            for number in range(steps):
                if stuck and number == steps // 2:
                    with suppress(FileExistsError):  # of all ranks one, once
                        Path(stuck).touch(exist_ok=False)
                        time.sleep(60.0)
                time.sleep(seconds)
                self.context.pulse.beat()
            with self.context.pulse.expected(False):
                time.sleep(waits_s)
        return self.serve(batch)
