"""One process group over the ranks of two worlds: trainers first, then a generator on devices of its own.

Every group of processes has a torch.distributed world of its own (a generator builds its tensor-parallel groups from
the whole of it), and torch makes groups only inside a world. The joint group is made beside both: its ranks meet in the
trainers' store, under a name of their own that is never used again: a generator that was started anew gets a new group.

    world of the trainers    r0 r1 | joint ranks 0 1
    world of the generator   r0 r1 | joint ranks 2 3

Its all-to-all is point to point: gloo and NCCL exchange one message per pair that has something to send.
"""

from __future__ import annotations

import gc
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

_PREFIX = "hybridflow/weights"


def meeting_point() -> str:
    """``host:port`` of the store of this process's own world. Every rank gives the same."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def join_worlds(
    meeting: str, name: str, *, rank: int, world: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """The joint group. Collective: returns when all ``world`` ranks have called.

    Its rank and size are asked of the group itself: ``dist.get_rank`` knows only groups inside a world.

    Args:
        meeting: ``meeting_point()`` of the trainers.
        name: of this group, the same on all its ranks; never that of an earlier one.
        rank: rank in the joint group.
        world: ranks of the joint group.
        device: where tensors live that travel: gloo for ``cpu``, NCCL for ``cuda`` (not run: no GPU here).
        timeout_s: of the meeting and of every collective.
    """
    host, port = meeting.rsplit(":", 1)
    timeout = timedelta(seconds=timeout_s)
    store = dist.PrefixStore(f"{_PREFIX}/{name}", dist.TCPStore(host, int(port), is_master=False, timeout=timeout))
    group = dist.ProcessGroup(store, rank, world)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        kind, backend = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, rank, world, options)
    else:
        kind, backend = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, world, timeout)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def forget_frames(error: BaseException) -> None:
    """Lets go of what the frames of ``error`` hold: a group that one of them holds stays open, and its peers waiting.

    gloo closes its connections, which is how a peer learns that nobody will come, when the last reference to a group
    is gone (torch 2.13 has no call for it); frames of an error are in cycles with it.
    """
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    gc.collect()
