"""The main job in a process of its own that dies where a test wants it: ``python -m tests.faults.job N KEY=VALUE ...``.

kill -9 on itself right behind step N, while a checkpoint may still be written; 0: never.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hybridflow.cli.ppo import main
from hybridflow.trainer.run import Run
from tests.jobs import SMALL


def start_job(
    folder: Path,
    options: dict[str, Any],
    *,
    die_after: int = 0,
    enter: Sequence[str] = (),
    output: IO[str] | int = subprocess.PIPE,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """The small job of ``tests/jobs.py`` with ``options``, as the leader of a process group.

    ``enter``: words in front of the command (a network namespace); ``output``: where its output
    goes; ``environment``: further variables.
    """
    chosen = {**SMALL, "trainer.default_local_dir": folder, **options}
    words = [f"{key}={word(value)}" for key, value in chosen.items()]
    return subprocess.Popen(
        [*enter, sys.executable, "-m", "tests.faults.job", str(die_after), *words],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
        cwd=Path(__file__).parents[2],
    )


def word(value: Any) -> str:
    """``value`` as it is typed behind ``key=``."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{entry}" for name, entry in value.items()) + "}"
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)


def die_after(step: int) -> None:
    """From now on this process ends behind ``step`` of any run."""
    after = Run.after

    def dying(run: Run, done: int) -> None:
        after(run, done)
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Run.after = dying


if __name__ == "__main__":
    die_after(int(sys.argv[1]))
    raise SystemExit(main(sys.argv[2:]))
