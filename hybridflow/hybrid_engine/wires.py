"""How packed bytes get from rank to rank: through a collective, or out of buckets that the ranks of one machine share.

    collective   fill(0) start(0) | fill(1) start(1) wait(0) empty(0) | fill(2) start(2) wait(1) empty(1) | ...
    shared       fill(0) all-filled  empty(0) all-emptied | fill(1) all-filled empty(1) all-emptied | ...

*Collective*: one all-to-all a round over any network; a bucket holds what is sent and then what is received, and two
are in flight. *Shared*: every rank maps every other's bucket, so a receiver reads straight out of the sender's: no
socket, no second copy, one bucket. On CPU a bucket is a file in /dev/shm, which has lost its name before a byte is
written, so nothing is left behind. On a GPU it is device memory opened by CUDA IPC (not run: no GPU here), the only way
between two processes of one device, where NCCL refuses; the group is then gloo's.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from hybridflow.utils.errors import EngineError

T = TypeVar("T")
KINDS = ("collective", "shared")
SHARED_MEMORY = Path("/dev/shm")
SPARE_SHARE = 0.5
"""At most this share of the free shared memory is taken for buckets."""


class Sizes(Protocol):
    """What a wire must know of a round."""

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes to every rank."""
        ...

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes from every rank."""
        ...


@dataclass(frozen=True, slots=True)
class RoundWork:
    """What a rank does in a round; the number of the round comes first."""

    fill: Callable[[int, Tensor], None]
    """Packs what leaves this rank into the bucket, ordered by receiver."""
    copy: Callable[[int], None]
    """Copies what stays."""
    empty: Callable[[int, Sequence[Tensor]], None]
    """Writes what arrived: bytes by sender."""


class Tries:
    """Local work between collectives: its seconds by kind, and its failures, kept for the end."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.seconds: dict[str, float] = dict.fromkeys(("pack", "copy", "wait", "write"), 0.0)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Adds the time inside to ``kind``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - started

    def attempt(self, kind: str, action: Callable[[], T]) -> T | None:
        """Runs ``action``; a failure is kept for later, since the peers still wait in the next collectives."""
        with self.timed(kind):
            try:
                return action()
            except Exception as failure:  # noqa: BLE001 - re-raised by ``Transport.run`` after the last collective
                self.failures.append(failure)
                return None


class Wire(Protocol):
    """One way to run rounds. Collective: all ranks of the group move together."""

    def move(self, rounds: Sequence[Sizes], work: RoundWork, tries: Tries) -> int:
        """Runs all rounds; bytes of bucket held at once."""
        ...


class Collective:
    """All-to-all over ``group``; None: a world of one, where nothing travels."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device

    def move(self, rounds: Sequence[Sizes], work: RoundWork, tries: Tries) -> int:
        """See ``Wire``."""
        sizes = sorted((sum(part.sent) + sum(part.received) for part in rounds), reverse=True)[:2]
        buckets = [torch.empty(sizes[0], dtype=torch.uint8, device=self._device) for _ in sizes]
        moving: Callable[[], None] | None = None
        for number, part in enumerate([*rounds, None]):
            started = None
            if part is not None:
                bucket = buckets[number % 2]
                tries.attempt("pack", partial(work.fill, number, bucket))
                started = self._start(number, part, bucket, work, tries)
                tries.attempt("copy", partial(work.copy, number))
            if moving is not None:
                moving()
            moving = started
        return sum(bucket.numel() for bucket in buckets)

    def _start(self, number: int, part: Sizes, bucket: Tensor, work: RoundWork, tries: Tries) -> Callable[[], None]:
        """Starts the round; the answer waits for it and writes what arrived."""
        sent, received = sum(part.sent), sum(part.received)
        handle = None
        if self._group is not None:
            handle = dist.all_to_all_single(
                bucket[sent : sent + received],
                bucket[:sent],
                list(part.received),
                list(part.sent),
                group=self._group,
                async_op=True,
            )

        def finish() -> None:
            if handle is not None:
                with tries.timed("wait"):
                    handle.wait()
            arrived = bucket[sent : sent + received].split(list(part.received))
            tries.attempt("write", partial(work.empty, number, arrived))

        return finish


class Shared:
    """Buckets that every rank of ``group`` can read: all are processes of one machine (CPU) or of one GPU.

    Args:
        group: the ranks; must take CPU tensors.
        device: where buckets live.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def move(self, rounds: Sequence[Sizes], work: RoundWork, tries: Tries) -> int:
        """See ``Wire``. Raises EngineError on every rank, before the first round, when a rank cannot share a bucket."""
        if not rounds:
            return 0
        me = self._group.rank()
        starts = self._starts(rounds)
        own, everyone = self._open(max(sum(part.sent) for part in rounds))
        for number, part in enumerate(rounds):
            tries.attempt("pack", partial(work.fill, number, own))
            with tries.timed("wait"):
                self._all_reached()
            tries.attempt("copy", partial(work.copy, number))
            arrived = [
                bucket[start : start + size]
                for bucket, start, size in zip(everyone, starts[number], part.received, strict=True)
            ]
            assert part.received[me] == 0, "what a rank owns is copied, not sent"
            tries.attempt("write", partial(work.empty, number, arrived))
            with tries.timed("wait"):
                self._all_reached()
        return own.numel()

    def _starts(self, rounds: Sequence[Sizes]) -> list[list[int]]:
        """Where this rank's bytes start in each rank's bucket, by round."""
        sent = torch.tensor([part.sent for part in rounds], dtype=torch.int64)
        everyone = [torch.empty_like(sent) for _ in range(self._group.size())]
        dist.all_gather(everyone, sent, group=self._group)
        before = [by_round[:, : self._group.rank()].sum(1) for by_round in everyone]
        return torch.stack(before, dim=1).tolist()

    def _open(self, size: int) -> tuple[Tensor, list[Tensor]]:
        """This rank's bucket, and everyone's by rank."""
        share = share_device_bucket if self._device.type == "cuda" else share_host_bucket
        opened: list[Tensor] = []
        own: Tensor | None = None
        handle: Any = None
        failure = ""
        close: Callable[[], None] = _nothing
        try:
            own, handle, close = share(max(1, size), self._device)
        except (OSError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {error}"
        said = self._gather((handle, failure))
        try:
            if own is not None and not any(reason for _, reason in said):
                opened = [own if handle is None else handle.open() for handle, _ in self._without_own(said)]
        except (OSError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {error}"
        failed = [reason for _, reason in said] if any(reason for _, reason in said) else self._gather(failure)
        close()
        if any(failed) or own is None:
            lines = [f"rank {rank}: {reason}" for rank, reason in enumerate(failed) if reason]
            raise EngineError("buckets cannot be shared; nothing was written\n" + "\n".join(lines))
        return own, opened

    def _without_own(self, said: list[Any]) -> list[Any]:
        """The same with this rank's own handle left out: it has its bucket already."""
        return [(None, "") if rank == self._group.rank() else one for rank, one in enumerate(said)]

    def _all_reached(self) -> None:
        """Returns when every rank has called, with its work on the device done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.all_reduce(torch.zeros(1), group=self._group)

    def _gather(self, own: Any) -> list[Any]:
        found = [own] * self._group.size()
        dist.all_gather_object(found, own, group=self._group)
        return found


@dataclass(frozen=True, slots=True)
class HostHandle:
    """A file in shared memory."""

    path: str
    size: int

    def open(self) -> Tensor:
        """The bucket of another process."""
        with open(self.path, "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), self.size), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """Device memory of another process, by CUDA IPC. Not run: no GPU here."""

    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def open(self) -> Tensor:
        """The bucket of another process."""
        return self.rebuild(*self.arguments)


def share_host_bucket(size: int, device: torch.device) -> tuple[Tensor, HostHandle, Callable[[], None]]:
    """A bucket in shared memory, its handle, and what removes its name once all have opened it.

    Raises:
        OSError: when there is no room (asked for at once: a mapped file without pages would kill the process later).
    """
    del device
    path = SHARED_MEMORY / f"hybridflow-{os.getpid()}-{secrets.token_hex(6)}"
    with path.open("x+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            bucket = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError:
            path.unlink()
            raise
    return bucket, HostHandle(str(path), size), path.unlink


def share_device_bucket(size: int, device: torch.device) -> tuple[Tensor, DeviceHandle, Callable[[], None]]:
    """A bucket in device memory and its CUDA IPC handle. Not run: no GPU here."""
    bucket = torch.empty(size, dtype=torch.uint8, device=device)
    rebuild, arguments = reduce_tensor(bucket)
    return bucket, DeviceHandle(rebuild, arguments), _nothing


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits, as far as wires go."""

    device: str
    """``cpu``, or the uuid of the GPU."""
    sees_all: bool
    """Whether this rank sees a file in shared memory that each of the others has just made."""
    free_bytes: int
    """Shared memory that is free."""


def choose_wire(seats: Sequence[Seat], bucket_bytes: int) -> str:
    """``shared`` or ``collective``, from where all ranks sit.

    Shared where collectives do not work (two ranks on one GPU) and where they are the slower way (all ranks are CPU
    processes that see one shared memory with room for all buckets).
    """
    devices = [seat.device for seat in seats]
    if len(seats) == 1 or not all(seat.sees_all for seat in seats):
        return "collective"
    if all(device == "cpu" for device in devices):
        room = min(seat.free_bytes for seat in seats) * SPARE_SHARE
        return "shared" if len(seats) * bucket_bytes <= room else "collective"
    return "shared" if len(set(devices)) < len(devices) else "collective"


def find_seats(group: dist.ProcessGroup, device: torch.device) -> list[Seat]:
    """Where all ranks sit. Collective."""

    def gather(own: Any) -> list[Any]:
        found = [own] * group.size()
        dist.all_gather_object(found, own, group=group)
        return found

    own = SHARED_MEMORY / f"hybridflow-{os.getpid()}-{secrets.token_hex(6)}"
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    if usable:
        own.touch(mode=0o600)
    try:
        names = gather(str(own) if usable else "")
        sees_all = all(name and Path(name).exists() for name in names)
        room = os.statvfs(SHARED_MEMORY) if usable else None
        free = room.f_bavail * room.f_frsize if room is not None else 0
        place = "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
        return gather(Seat(place, sees_all, free))
    finally:
        own.unlink(missing_ok=True)


def _nothing() -> None:
    """No name to remove."""
