"""Variables that libraries read before import: set for this process by re-executing it once.

Ray workers get theirs by runtime_env. With ``trainer.controller=local`` the workers live here, so the interpreter is
replaced by one that starts with the plan's variables. The second start finds them in place: no marker is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence


def ensure_environment(variables: Mapping[str, str], unset: Sequence[str] = ()) -> None:
    """Returns when this process has ``variables`` and lacks ``unset``; else replaces it by one that does."""
    wrong = any(os.environ.get(name) != value for name, value in variables.items())
    if not wrong and not any(name in os.environ for name in unset):
        return
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, **variables})
