"""One thread for the collectives of every gloo group: torch's second one races with the first and corrupts the heap.

After a collective, each of the two threads that torch (2.13) gives a group writes the operation's name into one string
that both share, without a lock (``ProcessGroupGloo::runLoop``, ``pgStatus_->lastCompletedWorkName``). Names of over 15
letters lie on the heap, and tensor parallelism gathers by one (``ALLGATHER_COALESCED``): while it replaces the string,
the other thread writes into what has just been freed. Once in some hundred thousand collectives a rank then dies of
"malloc(): unaligned tcache chunk detected" or a segmentation fault (docs/design/0029).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

INTERFACES = "GLOO_SOCKET_IFNAME"
"""Network interfaces, by commas; read as torch reads it."""


_GROUP: Any = ProcessGroupGloo
"""With what torch's type stubs leave out."""
_construct = _GROUP.__init__


def use_one_thread() -> None:
    """From now on every gloo group of this process, torch's and vLLM's own included, runs its collectives in order.

    torch has no option for it where it makes groups, so the constructor that it calls is replaced. Again is harmless.
    """
    _GROUP.__init__ = _one_thread


def _one_thread(
    group: ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)
) -> None:
    options = _GROUP._Options()
    options._threads = 1
    options._timeout = timeout
    names = [name for name in os.environ.get(INTERFACES, "").split(",") if name]
    devices = [_GROUP.create_device(interface=name) for name in names]
    options._devices = devices or [_GROUP.create_default_device()]
    _construct(group, store, rank, size, options)
