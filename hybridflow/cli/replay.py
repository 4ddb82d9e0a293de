"""``python -m hybridflow.replay``: runs one update again whose loss or gradient was not finite, and says why.

    python -m hybridflow.replay RUN/bad_updates/actor_step_12_update_1

The run wrote the update out when it stopped (trainer.max_skipped_updates). Here it is run on this machine's CPU, by one
process whatever the number of ranks was: first whole, then in halves until single rows are left that are not finite by
themselves, then each of these with every operation watched. No weight is changed.

Exit codes: 0 the fault is reproduced, 1 the update is finite here, 2 the folder cannot be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hybridflow.utils.optional import load

REPLAY = "hybridflow.cli.bad_update:replay_folder"
"""Imports torch, which a question for help should not wait for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Replays the update in the folder given and prints what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridflow.replay",
        description="Runs one update again whose loss or gradient was not finite, and says why.",
        epilog="exit codes: 0 the fault is reproduced, 1 the update is finite here, 2 the folder cannot be used",
    )
    parser.add_argument("folder", type=Path, help="a folder below bad_updates/ of a run")
    parser.add_argument("--model", help="folder of the model, where it lies elsewhere than in the run")
    arguments = parser.parse_args(argv)
    return load(REPLAY)(arguments.folder, arguments.model)
