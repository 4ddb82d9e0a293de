"""Objects in files of shared memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
from pathlib import Path

import numpy as np
import pytest

from hybridflow.single_controller import health
from hybridflow.single_controller.segments import (
    SegmentStore,
    SegmentTable,
    remove_segments_of,
    remove_segments_of_the_dead,
    segments_of,
)
from hybridflow.utils.errors import WorkerError

DATA = np.arange(200, dtype=np.uint8)


def test_another_process_reads_what_was_put() -> None:
    kept = SegmentStore("me").put(DATA)
    found = SegmentStore("you").open(kept.token, kept.size, kept.owner).read()
    assert np.array_equal(found, DATA) and not found.flags.writeable
    Path(kept.token).unlink()
    assert np.array_equal(found, DATA), "who reads is not disturbed by who frees"
    with pytest.raises(WorkerError, match="rows are lost: they were kept by me, which is gone"):
        kept.read()


def test_a_file_goes_with_the_last_reference_to_it() -> None:
    read, table = [], SegmentTable()
    kept = SegmentStore("me").put(DATA)
    one = table.hold(kept.token, kept.size, kept.owner, read.append)
    other = table.hold(kept.token, kept.size, kept.owner, read.append)
    assert one is other and len(one.read()) == 200 and read == [one]
    del one
    assert Path(kept.token).exists()
    read.clear()
    del other
    gc.collect()
    assert not Path(kept.token).exists()


def test_what_the_dead_kept_is_found_by_their_pid_and_by_no_other_number() -> None:
    store = SegmentStore("me")
    tokens = [store.put(DATA).token for _ in range(12)]
    assert not re.search(r"\d", Path(tokens[-1]).name), "a number in a name would be taken for a pid or a port"
    remove_segments_of([os.getpid() * 10, os.getpid() // 10])
    assert all(Path(token).exists() for token in tokens)
    remove_segments_of([os.getpid()])
    assert not any(Path(token).exists() for token in tokens)


def test_two_stores_of_one_process_do_not_overwrite_one_another() -> None:
    one, other = SegmentStore("me").put(DATA), SegmentStore("me").put(DATA + 1)
    assert np.array_equal(one.read(), DATA) and np.array_equal(other.read(), DATA + 1)
    remove_segments_of([os.getpid()])


def test_what_is_kept_is_nobody_elses_to_read() -> None:
    path = Path(SegmentStore("me").put(DATA).token)
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()


def test_what_the_dead_kept_goes_when_nobody_else_could_do_it() -> None:
    mine = Path(SegmentStore("me").put(DATA).token)
    child = multiprocessing.get_context("forkserver").Process(target=_keep_and_die)
    child.start()
    child.join()
    assert child.pid is not None and child.exitcode == -9
    assert len(segments_of([child.pid])) == 1
    stacks = Path("/dev/shm").glob(f"hybridflow-stacks-*-{child.pid}")
    assert len(left := list(stacks)) == 1
    of_another_machine = mine.with_name(segments_of([child.pid])[0].name.replace("-kept-", "-kept-a"))
    of_another_machine.touch()
    remove_segments_of_the_dead()
    assert segments_of([child.pid]) == [] and mine.exists() and of_another_machine.exists()
    assert not left[0].exists()
    mine.unlink()
    of_another_machine.unlink()


def _keep_and_die() -> None:
    health.answer_stack_signal()
    SegmentStore("me").put(DATA)
    os.kill(os.getpid(), 9)
