"""run_ranks: results by rank, and failures that name the rank."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def summed(value: int) -> int:
    held = torch.tensor(value + dist.get_rank())
    dist.all_reduce(held)
    return int(held) + 100 * dist.get_rank()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("a known fault")
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def sleep() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(2, summed, 5) == [11, 111]


def test_an_exception_names_its_rank_and_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="(?s)rank 1 raised.*a known fault"):
        run_ranks(2, fail_on_one)
    assert time.monotonic() - start < 30


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 died without an answer, exit code 3|rank 0 raised"):
        run_ranks(2, die_on_one)


def test_a_deadline_names_who_did_not_answer() -> None:
    with pytest.raises(RankError, match=r"no answer within 6 s from rank\(s\) \[0\]"):
        run_ranks(2, sleep, deadline_s=6)
