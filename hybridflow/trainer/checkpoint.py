"""Checkpoints on disk: a folder per step that is either complete and checked, or not there.

``global_step_N.partial`` is filled, synced, described by ``manifest.json`` (files, sizes, digests) and renamed to
``global_step_N``; only then ``latest_checkpointed_iteration.txt`` is replaced. Whatever a crash leaves behind, the
newest folder whose manifest holds is the one that is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.utils.errors import StateError

logger = logging.getLogger(__name__)

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
_PREFIX = "global_step_"
_PARTIAL = ".partial"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint."""

    step: int
    folder: Path

    def state(self) -> dict[str, Any]:
        """The driver's own state: data position, controllers, versions."""
        return json.loads((self.folder / STATE).read_text())


class CheckpointStore:
    """All checkpoints of a run.

    Args:
        root: ``trainer.default_local_dir``.
        keep: newest checkpoints that are kept; None: all.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        self.root = root
        self._keep = keep

    def save(self, step: int, write_roles: Callable[[Path], None], state: dict[str, Any]) -> Checkpoint:
        """Writes step ``step``: ``write_roles(folder)`` fills it, then state, manifest, rename, pointer, pruning."""
        final = self.root / f"{_PREFIX}{step}"
        partial = final.with_name(final.name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_roles(partial)
        _write_synced(partial / STATE, json.dumps(state, indent=1))
        _write_synced(partial / MANIFEST, json.dumps({"step": step, "files": _describe(partial)}, indent=1))
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync_folder(self.root)
        _replace_text(self.root / POINTER, f"{step}\n")
        self._prune()
        return Checkpoint(step, final)

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint; damaged ones are skipped with a warning that says what is wrong."""
        for step in sorted(self._steps(), reverse=True):
            folder = self.root / f"{_PREFIX}{step}"
            damage = damage_of(folder)
            if damage is None:
                return Checkpoint(step, folder)
            logger.warning("checkpoint %s is skipped: %s", folder, damage)
        return None

    def at(self, folder: Path) -> Checkpoint:
        """The checkpoint in ``folder``.

        Raises:
            StateError: when it is not a complete checkpoint; says why.
        """
        damage = damage_of(folder)
        if damage is not None:
            raise StateError(f"checkpoint {folder} cannot be used: {damage}")
        return Checkpoint(int(folder.name.removeprefix(_PREFIX)), folder)

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        names = [entry.name.removeprefix(_PREFIX) for entry in self.root.glob(f"{_PREFIX}*") if entry.is_dir()]
        return [int(name) for name in names if name.isdigit()]

    def _prune(self) -> None:
        if self._keep is None:
            return
        for step in sorted(self._steps())[: -self._keep or None]:
            shutil.rmtree(self.root / f"{_PREFIX}{step}")


def damage_of(folder: Path) -> str | None:
    """What is wrong with the checkpoint in ``folder``; None: nothing."""
    manifest_path = folder / MANIFEST
    if not manifest_path.is_file():
        return f"{MANIFEST} is missing (the save was cut short)"
    try:
        files: dict[str, dict[str, Any]] = json.loads(manifest_path.read_text())["files"]
    except (json.JSONDecodeError, KeyError) as error:
        return f"{MANIFEST} is damaged: {error!r}"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}"
        if _digest(path) != entry["blake2b"]:
            return f"{name} does not match its digest"
    return None


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "blake2b": _digest(path)} for path in files}


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    _write_synced(partial, text)
    os.replace(partial, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
