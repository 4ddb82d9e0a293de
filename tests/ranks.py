"""``run_ranks``: a function on n gloo ranks, each a fresh process forked from one preloaded server.

Importing torch, transformers and our engine costs seconds per process, forking a process that has them costs
milliseconds. The forkserver starts with the first call and lives as long as the test session; every call gets new
processes, so no state leaks from case to case and a hung case can be ended without harm.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_PRELOAD = [
    "pytest",  # test modules import it: half a second a rank
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers",
    "tests.tiny",
    "hybridflow.engines.train.fsdp",
    "hybridflow.hybrid_engine.publish",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


class RankError(AssertionError):
    """A rank raised, died or did not answer in time; names the rank."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    deadline_s: float = 120.0,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """What ``function(*args)`` returned on ranks 0 .. world-1 of a gloo world.

    ``function`` is a module-level function and runs after ``init_process_group``; results and arguments are pickled.
    A rank of ``may_die`` whose process ends without an answer counts as having returned None.

    Raises:
        RankError: the first failure, with its rank and traceback, or who did not answer within ``deadline_s``.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        store = str(Path(folder) / "store")
        processes, pipes = [], []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_rank_main, args=(rank, world, store, theirs, function, args, deadline_s), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, processes, deadline_s, may_die)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.kill()
                process.join()


def _collect(
    pipes: list[Connection], processes: list[ForkServerProcess], deadline_s: float, may_die: tuple[int, ...]
) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + deadline_s
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in missing], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise RankError(f"no answer within {deadline_s:.0f} s from rank(s) {missing}")
        failures = []
        for rank in missing:
            if pipes[rank] not in ready:
                continue
            try:
                ok, payload = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                if rank in may_die:
                    results[rank] = None
                    continue
                processes[rank].join()
                failures.append(f"rank {rank} died without an answer, exit code {processes[rank].exitcode}")
                continue
            if ok:
                results[rank] = payload
            else:
                failures.append(f"rank {rank} raised:\n{payload}")
        if failures:
            raise RankError("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int, world: int, store: str, pipe: Connection, function: Callable[..., Any], args: tuple, deadline_s: float
) -> None:
    import torch
    import torch.distributed as dist

    from hybridflow.single_controller.gloo import use_one_thread

    use_one_thread()
    faulthandler.enable()  # a crash in native code prints where every thread stood
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=deadline_s)
        )
        answer = (True, function(*args))
        payload = pickle.dumps(answer)
    except BaseException:  # noqa: BLE001 a process boundary: the parent re-raises with the rank
        payload = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(payload)
    # Its connections stand until all ranks have answered: a rank that ends early, rightly or not, must not make a peer
    # raise that still connects or communicates.
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()
    os._exit(0)
