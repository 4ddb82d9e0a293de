"""Checkpoints on disk: a folder per step that is either complete and checked, or not there.

``global_step_N.partial`` is filled, synced, described by ``manifest.json`` (files, sizes, digests) and renamed to
``global_step_N``; only then ``latest_checkpointed_iteration.txt`` is replaced. Whatever a crash leaves behind, the
newest folder whose manifest holds is the one that is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.constraints import is_url
from hybridflow.trainer.remote import RemoteFolder
from hybridflow.utils.errors import StateError

logger = logging.getLogger(__name__)

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
_PREFIX = "global_step_"
_PARTIAL = ".partial"
_PRUNED = ".pruned"
_REPLACED = ".replaced-"
_FETCHED = ".fetched"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint."""

    step: int
    folder: Path

    def state(self) -> dict[str, Any]:
        """The driver's own state: data position, controllers, configuration."""
        return json.loads((self.folder / STATE).read_text())

    def about(self) -> dict[str, Any]:
        """The manifest: versions and layout of the run that wrote it, its files."""
        return _manifest(self.folder)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay."""

    newest: int | None = None
    """How many of the newest; None: all of them."""
    every: int | None = None
    """Steps that are multiples of it stay too."""
    best: bool = False
    """Whether the one with the highest score stays too; of equal ones the newest."""

    def __post_init__(self) -> None:
        assert self.newest is None or self.newest >= 1

    def stay(self, scores: Mapping[int, float | None]) -> set[int]:
        """The steps that stay, of those whose scores are given (None: a step without one)."""
        steps = sorted(scores)
        if self.newest is None:
            return set(steps)
        kept = set(steps[-self.newest :])
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        scored = [(score, step) for step, score in scores.items() if score is not None and not math.isnan(score)]
        if self.best and scored:
            kept.add(max(scored)[1])
        return kept


class CheckpointStore:
    """All checkpoints of a run.

    Args:
        root: ``trainer.default_local_dir``.
        retention: which stay; nothing goes before a newer one is complete.
        about: versions and layout, kept in every manifest.
        remote: where every complete checkpoint is copied to, and where newer ones may be; None: nowhere.
        fetch_s: how long fetching a checkpoint from a URL may take (``at``).
    """

    def __init__(
        self,
        root: Path,
        retention: Retention | None = None,
        about: Mapping[str, Any] | None = None,
        remote: RemoteFolder | None = None,
        *,
        fetch_s: float = threading.TIMEOUT_MAX,
    ) -> None:
        self.root = root
        self._retention = Retention() if retention is None else retention
        self._about = dict(about or {})
        self._remote = remote
        self._fetch_s = fetch_s
        self._begun_at = 0
        self._own: set[int] = set()
        self._cut_short: set[int] = set()
        """Steps of which a part may lie in the remote folder."""

    def save(self, step: int, write_roles: Callable[[Path], None], state: Mapping[str, Any]) -> Checkpoint:
        """``begin``, ``write_roles(folder)``, ``complete``."""
        write_roles(self.begin(step))
        return self.complete(step, state)

    def begin(self, step: int) -> Path:
        """An empty folder for the files of ``step``; what interrupted saves, removals and ``at`` left is removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        for ending in (_PARTIAL, _PRUNED, _FETCHED):
            for rest in self.root.glob(f"{_PREFIX}*{ending}"):
                shutil.rmtree(rest)
        partial = self._partial(step)
        partial.mkdir()
        return partial

    def complete(self, step: int, state: Mapping[str, Any], *, score: float | None = None) -> Checkpoint:
        """Turns the filled folder of ``step`` into a checkpoint: state, manifest, rename, pointer; then removes others.

        Args:
            step: as given to ``begin``.
            state: the driver's own state, plain JSON.
            score: for ``Retention.best``; higher is better.
        """
        partial, final = self._partial(step), self._folder(step)
        _write_synced(partial / STATE, json.dumps(state, indent=1))
        manifest = {**self._about, "step": step, "score": score, "files": _describe(partial)}
        _write_synced(partial / MANIFEST, json.dumps(manifest, indent=1))
        self._set_aside(step)
        os.replace(partial, final)
        _sync_folder(self.root)
        self._own.add(step)
        _replace_text(self.root / POINTER, f"{step}\n")
        self._prune()
        if self._remote is not None:
            self._copy(self._remote, final)
        return Checkpoint(step, final)

    def abandon(self, step: int) -> None:
        """Gives the space of an unfinished save back; where the disk refuses even that, the next save tries again."""
        partial = self._partial(step)
        if not partial.exists():
            return
        try:
            shutil.rmtree(partial)
        except OSError as error:
            logger.warning("%s stays for now: %s", partial, error)

    def go_on_from(self, step: int) -> None:
        """This run continues after ``step``: complete checkpoints beyond it are of another run.

        The first save moves them aside (``global_step_N.replaced-K``), or a later resume would take one of them.
        """
        self._begun_at = step

    @property
    def last_own(self) -> int:
        """The last step that this very store completed; 0: none."""
        return max(self._own, default=0)

    def newest_own(self) -> Checkpoint | None:
        """The newest complete checkpoint that this very store made; None where there is none."""
        return self._newest(self._own.intersection(self._steps()), [])

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint; damaged ones are skipped with a warning that says what is wrong.

        One that only the remote folder has, or has undamaged, is fetched first.
        """
        here = self._steps()
        there = [] if self._remote is None else _numbers(self._remote.complete(last=MANIFEST))
        found = self._newest(here, there)
        if found is None and (here or there):
            logger.warning("no checkpoint below %s can be used: the run begins anew", self.root)
        return found

    def _newest(self, here: Iterable[int], there: Iterable[int]) -> Checkpoint | None:
        here, there = set(here), set(there)
        for step in sorted(here | there, reverse=True):
            folder = self._folder(step)
            damage = damage_of(folder) if step in here else None
            if damage is not None and step in there:
                logger.warning("checkpoint %s is moved to %s: %s", folder, self._moved_aside(step).name, damage)
                here.discard(step)
            if step not in here:
                assert self._remote is not None
                logger.info("fetching %s from %s", folder.name, self._remote.url)
                self._remote.pull(folder.name, folder)
                damage = damage_of(folder)
            if damage is None:
                return Checkpoint(step, folder)
            logger.warning("checkpoint %s is skipped: %s", folder, damage)
        return None

    def at(self, where: str) -> Checkpoint:
        """The checkpoint in the folder ``where``; from a URL it is fetched first, and stays until the first save.

        Raises:
            MachineError: when the file system of the URL refuses.
            StateError: when it is not a complete checkpoint; says why.
        """
        folder = self._fetch(where) if is_url(where) else Path(where)
        damage = damage_of(folder)
        if damage is not None:
            raise StateError(f"checkpoint {where} cannot be used: {damage}")
        return Checkpoint(int(_manifest(folder)["step"]), folder)

    def _fetch(self, url: str) -> Path:
        above, _, name = url.rstrip("/").rpartition("/")
        folder = self.root / f"{_PREFIX}{name.removeprefix(_PREFIX)}{_FETCHED}"
        shutil.rmtree(folder, ignore_errors=True)
        logger.info("fetching %s", url)
        RemoteFolder(above, key="trainer.resume_from_path", deadline_s=self._fetch_s).pull(name, folder)
        return folder

    def _folder(self, step: int) -> Path:
        return self.root / f"{_PREFIX}{step}"

    def _partial(self, step: int) -> Path:
        return self.root / f"{_PREFIX}{step}{_PARTIAL}"

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        return _numbers(entry.name for entry in self.root.glob(f"{_PREFIX}*") if entry.is_dir())

    def _set_aside(self, step: int) -> None:
        foreign = [other for other in self._steps() if other > self._begun_at and other not in self._own]
        here = [step] if self._folder(step).exists() else []
        for other in sorted(set(foreign + here)):
            logger.warning(
                "%s is damaged, or of a run other than this one, which began after step %d: moved to %s",
                self._folder(other),
                self._begun_at,
                self._moved_aside(other).name,
            )

    def _moved_aside(self, step: int) -> Path:
        number = 1
        while (aside := self.root / f"{_PREFIX}{step}{_REPLACED}{number}").exists():
            number += 1
        os.replace(self._folder(step), aside)
        return aside

    def _prune(self) -> None:
        # A folder without manifest is nobody's checkpoint: it neither counts nor goes.
        scores = {
            step: _score(self._folder(step)) for step in self._steps() if (self._folder(step) / MANIFEST).exists()
        }
        for step in sorted(set(scores) - self._retention.stay(scores)):
            # Renamed first: a removal that is cut short must not leave half a checkpoint under its name.
            going = self.root / f"{_PREFIX}{step}{_PRUNED}"
            os.replace(self._folder(step), going)
            shutil.rmtree(going)

    def _copy(self, remote: RemoteFolder, final: Path) -> None:
        step = int(final.name.removeprefix(_PREFIX))
        self._cut_short.add(step)
        remote.push(final, last=MANIFEST)
        self._cut_short.discard(step)
        while self._cut_short:
            remote.remove(f"{_PREFIX}{self._cut_short.pop()}")
        held = remote.complete(last=MANIFEST)
        scores = {step: held[f"{_PREFIX}{step}"].get("score") for step in _numbers(held)}
        foreign = {step for step in scores if step > self._begun_at and step not in self._own}
        for step in sorted(foreign):
            remote.set_aside(f"{_PREFIX}{step}", _REPLACED)
            logger.warning("%s: step %d is of another run: moved aside", remote.url, step)
        own = {step: score for step, score in scores.items() if step not in foreign}
        for step in sorted(set(own) - self._retention.stay(own)):
            remote.remove(f"{_PREFIX}{step}")


def _numbers(names: Iterable[str]) -> list[int]:
    numbers = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
    return [int(number) for number in numbers if number.isdigit()]


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text())


def _score(folder: Path) -> float | None:
    try:
        score = _manifest(folder).get("score")
    except (ValueError, AttributeError, OSError):  # a damaged one is not the best
        return None
    return score if isinstance(score, (int, float)) else None


def damage_of(folder: Path) -> str | None:
    """What is wrong with the checkpoint in ``folder``; None: nothing. What cannot be read is damage, too."""
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing (the save was cut short)"
    try:
        manifest = _manifest(folder)
        int(manifest["step"])
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in dict(manifest["files"]).items()}
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is damaged: {error!r}"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error}"
    damages = (_file_damage(folder / name, name, *expected) for name, expected in files.items())
    return next((damage for damage in damages if damage is not None), None)


def _file_damage(path: Path, name: str, size: int, digest: str) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    try:
        if (found := path.stat().st_size) != size:
            return f"{name} has {found} bytes, the manifest says {size}"
        return None if _digest(path) == digest else f"{name} does not match its digest"
    except OSError as error:
        return f"{name} cannot be read: {error}"


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files}


def _digest(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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
