"""Groups of one thread: what torch races for with two, and the race itself, made wide enough to lose every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

MEMCPY = r"""
#include <stddef.h>
#include <string.h>
#include <unistd.h>
static const char name[] = "ALLREDUCE";
void *memcpy(void *to, const void *from, size_t count) {
  void *first = to;
  if (count == sizeof(name) - 1) {
    size_t same = 0;
    while (same < count && ((const char *)from)[same] == name[same]) same++;
    if (same == count) usleep(300);
  }
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
  return first;
}
"""
"""A ``memcpy`` that sleeps before it copies an operation's name, in which time the other thread may free it."""

RANK = """
import os, sys
import torch, torch.distributed as dist
from hybridflow.single_controller.gloo import use_one_thread
rank, store, fixed = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fixed"
if fixed:
    use_one_thread()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
calls, name, ones = torch.ops._c10d_functional, dist.group.WORLD.group_name, torch.ones(2)
for _ in range(100):
    held = [
        calls.all_gather_into_tensor(ones, 2, name) if number % 2 else calls.all_reduce(ones, "sum", name)
        for number in range(64)
    ]
    for tensor in held:
        calls.wait_tensor(tensor)
dist.barrier()
os._exit(0)  # ends of processes have a fault of their own: "terminate called without an active exception"
"""


def threads() -> tuple[int, int]:
    """Threads that run collectives in this process, and groups after one more was made."""
    dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1))
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name == "pt_gloo_runloop" for name in names), dist.distributed_c10d._world.group_count


def test_every_group_has_one_thread_for_its_collectives() -> None:
    assert run_ranks(2, threads) == [(2, 2), (2, 2)]


def exit_codes(folder: Path, way: str) -> list[int]:
    """Of two ranks that gather and reduce many times at once, with a slow ``memcpy`` of operations' names."""
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(MEMCPY)
    subprocess.run(["gcc", "-O2", "-fPIC", "-shared", "-fno-builtin", "-o", library, source], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    store = str(folder / way.replace(" ", "_"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), store, way], env=environment, stderr=subprocess.DEVNULL
        )
        for rank in range(2)
    ]
    return [rank.wait(timeout=100) for rank in ranks]


@pytest.mark.slow
def test_the_race_of_two_threads_ends_a_rank_and_one_thread_ends_the_race(tmp_path: Path) -> None:
    """When the first half passes no more, torch has been mended and the constructor need not be replaced any longer."""
    assert any(exit_codes(tmp_path, "as torch has it"))
    assert exit_codes(tmp_path, "fixed") == [0, 0]
