"""What to say about a path that does not exist."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config.problems import nearest


def similar(path: str) -> str:
    """A path near the one that does not exist, or where it was looked for."""
    given = Path(path).expanduser()
    if "$" in path:
        return "A variable in it was not expanded: the shell does that in double quotes, or write ${oc.env:NAME}."
    if given.exists():
        return "It is a folder: name a file in it." if given.is_dir() else "It is a file: name its folder."
    if not given.parent.is_dir():
        return f"There is no folder {given.parent} either."
    close = nearest(given.name, [entry.name for entry in given.parent.iterdir()])
    if close:
        return f"Did you mean {given.parent / close}?"
    return f"{given.parent} has nothing like it." if given.is_absolute() else f"Looked from {Path.cwd()}."
