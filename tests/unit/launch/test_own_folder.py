"""Two runs at once in one folder: the second is refused, and whatever ends the first frees the folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hybridflow.cli.front import BAD_MACHINE, guarded
from hybridflow.launch.own_folder import own_folder
from hybridflow.utils.errors import MachineError

HOLD = """
import pathlib, sys, time
from hybridflow.launch.own_folder import own_folder
with own_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_and_the_first_is_named(tmp_path):
    with own_folder(tmp_path / "run"):
        with pytest.raises(MachineError, match=rf"another run \(node \S+, pid {os.getpid()}\) writes to .*run\. Wait"):
            own_folder(tmp_path / "run").__enter__()
        with own_folder(tmp_path / "another"):
            pass
    with own_folder(tmp_path / "run"):
        pass


def test_a_folder_that_cannot_be_is_said_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"default_local_dir=.*file/run cannot be written to: .*Not a directory"):
        own_folder(tmp_path / "file" / "run").__enter__()


def test_an_error_and_a_kill_free_the_folder(tmp_path):
    with pytest.raises(KeyboardInterrupt), own_folder(tmp_path):
        raise KeyboardInterrupt
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"

        def second() -> int:
            with own_folder(tmp_path):
                return 0

        assert guarded(second) == BAD_MACHINE
        holder.send_signal(signal.SIGKILL)
        holder.wait(20)
        assert guarded(second) == 0
    finally:
        holder.kill()
