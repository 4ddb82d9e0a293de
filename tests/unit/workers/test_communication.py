"""Time in collectives: sleeping until another rank comes counts, computing does not."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hybridflow.workers.communication import CollectiveTime
from tests.ranks import run_ranks


def wait_and_compute() -> tuple[float, float]:
    measured = CollectiveTime("cpu")
    square = torch.ones(300, 300)
    dist.barrier()
    measured.begin()
    if dist.get_rank() == 1:
        time_over = time.perf_counter() + 0.4
        while time.perf_counter() < time_over:
            square @ square
    else:
        dist.all_reduce(square)  # rank 1 comes 0.4 s later
    waited = measured.seconds()
    if dist.get_rank() == 1:
        dist.all_reduce(square)
    measured.begin()
    time_over = time.perf_counter() + 0.2
    while time.perf_counter() < time_over:
        square @ square
    return waited, measured.seconds()


def test_a_rank_that_waits_for_another_communicates_and_one_that_computes_does_not():
    (waited, after), (computed, _) = run_ranks(2, wait_and_compute)
    assert waited > 0.3
    assert computed < 0.1 and after < 0.1


def test_a_rank_alone_never_communicates():
    measured = CollectiveTime("cpu")
    measured.begin()
    time.sleep(0.05)
    assert measured.seconds() == 0.0
