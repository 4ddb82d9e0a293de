"""Two kinds of SIGKILL: the kernel's for memory, and anybody's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridflow.single_controller.health import exit_cause, log_cause
from hybridflow.single_controller.oom import OomKills, oom_kills

NONE = OomKills(cgroup=0, node=4)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroups", "file"),
    [
        ("0::/job/7\n", "sys/fs/cgroup/job/7/memory.events"),
        ("0::/job/7\n", "sys/fs/cgroup/memory.events"),
        ("4:memory:/job/7\n0::/\n", "sys/fs/cgroup/memory/job/7/memory.oom_control"),
        ("4:cpu,memory:/job/7\n", "sys/fs/cgroup/memory/memory.oom_control"),
    ],
    ids=["version 2", "version 2 in a container", "version 1", "version 1 in a container"],
)
def test_both_counters_are_found(tmp_path, cgroups, file):
    files = {"proc/self/cgroup": cgroups, file: "under_oom 0\noom_kill 3\n", "proc/vmstat": "oom_kill 5\n"}
    assert oom_kills(tree(tmp_path, files)) == OomKills(cgroup=3, node=5)


def test_a_kernel_that_says_nothing_is_unknown(tmp_path):
    assert oom_kills(tmp_path) == OomKills(cgroup=None, node=None)


def test_this_kernel_says_it():
    found = oom_kills()
    assert found.cgroup is not None or found.node is not None


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (OomKills(cgroup=1, node=5), "by the kernel's out-of-memory killer: the memory limit of its cgroup"),
        (OomKills(cgroup=0, node=5), "while the kernel's out-of-memory killer ended processes of this node"),
        (OomKills(cgroup=None, node=4), "from outside .* no out-of-memory kill"),
        (NONE, "from outside .* no out-of-memory kill"),
        (OomKills(cgroup=None, node=None), "or the out-of-memory killer: see dmesg"),
        (None, "or the out-of-memory killer: see dmesg"),
    ],
)
def test_a_sigkill_is_told_apart_by_what_rose(now, says):
    with_kill = exit_cause(-9, NONE, now)
    assert re.search(says, with_kill), with_kill


def test_other_ends_need_no_counter():
    assert exit_cause(-11, NONE, OomKills(cgroup=1, node=5)) == "killed by SIGSEGV"
    assert exit_cause(3) == "exited with code 3"


def test_a_fatal_error_in_the_log_names_the_signal():
    fatal = "Fatal Python error: Segmentation fault"
    assert log_cause(f"x\n{fatal}\n\nThread 0x7f") == fatal
    assert log_cause("all is well") is None
