"""Where the numbers of a run go: one ``Tracker`` in front of any number of destinations.

Names and values are made plain once, here, before any destination sees them, so that the same metric has the same name
everywhere. A destination that fails is a warning, never the end of a training run.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hybridflow.utils.background import in_background
from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load

logger = logging.getLogger(__name__)

Scalar = int | float
Value = Scalar | str

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a destination may want to know about the run."""

    project: str
    experiment: str
    folder: Path
    """Folder of the run's outputs; exists."""
    config: Mapping[str, Any]
    """The resolved configuration as plain containers."""
    total_steps: int


@runtime_checkable
class Remembering(Protocol):
    """A destination that a run must find again when it goes on elsewhere from a checkpoint."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where they say; before the first call of ``log``."""
        ...


@runtime_checkable
class Abandonable(Protocol):
    """A destination that could keep this process from ending."""

    def abandon(self) -> None:
        """Ends what the process would wait for, while a call may still be under way."""
        ...


class Tracker(Protocol):
    """One destination. Built from a ``RunInfo``; the composite calls with plain names and values, one at a time."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes metrics of ``step``; steps do not decrease, and a step may come again with more of them."""
        ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Takes validation samples: one mapping (prompt, response, ground_truth, score ...) per sample."""
        ...

    def finish(self) -> None:
        """Flushes and closes; may be called twice."""
        ...


def build_trackers(
    names: Iterable[str],
    *,
    project: str,
    experiment: str,
    folder: str | Path,
    config: Mapping[str, Any],
    total_steps: int,
    deadline_s: float = threading.TIMEOUT_MAX,
) -> CompositeTracker:
    """The named destinations behind one tracker.

    Raises:
        ConfigError: for a name that is not registered, or whose package is not installed (the user asked for it). A
            destination that is installed but cannot start (no network, no login) is left out with a warning.
    """
    info = RunInfo(project=project, experiment=experiment, folder=Path(folder), config=config, total_steps=total_steps)
    info.folder.mkdir(parents=True, exist_ok=True)
    trackers: dict[str, Tracker] = {}
    for name in dict.fromkeys(names):
        if name not in TRACKERS:
            raise ConfigError(f"trainer.logger: no tracker {name!r}; allowed: {', '.join(TRACKERS)}")
        build: Callable[[RunInfo], Tracker] = load(TRACKERS[name])
        try:
            trackers[name] = build(info)
        except Exception as error:  # third-party code: a tracker never stops a run
            said = (name, type(error).__name__, error)
            logger.warning("tracker %s cannot start and is left out: %s: %s", *said, exc_info=True)
    return CompositeTracker(trackers, deadline_s=deadline_s)


class CompositeTracker:
    """Hands everything to each destination, in plain form, and survives their failures.

    The first failure of a destination is a warning with its cause; ``finish`` says how many calls were lost. One that
    lets ``deadline_s`` pass (``trainer.timeouts.track_s``) is given up.
    """

    def __init__(self, trackers: Mapping[str, Tracker], *, deadline_s: float = threading.TIMEOUT_MAX) -> None:
        self._trackers = dict(trackers)
        self._deadline_s = deadline_s
        self._given_up: set[str] = set()
        self._lost = dict.fromkeys(self._trackers, 0)
        self._finished = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics with cleaned names and plain values, to all."""
        plain = plain_metrics(metrics)
        self._each(lambda tracker: tracker.log(step, plain))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Samples to all; nothing happens when there are none."""
        if samples:
            self._each(lambda tracker: tracker.log_samples(step, samples))

    def finish(self) -> None:
        """Closes all, once."""
        if self._finished:
            return
        self._finished = True
        self._each(lambda tracker: tracker.finish())
        for name, lost in self._lost.items():
            if lost:
                logger.warning("tracker %s lost %d calls", name, lost)

    def state_dict(self) -> dict[str, Any]:
        """What destinations must find again, by name."""
        return {
            name: dict(tracker.state_dict())
            for name, tracker in self._trackers.items()
            if isinstance(tracker, Remembering) and name not in self._given_up
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on there; one that is new has nothing to find."""
        for name, tracker in self._trackers.items():
            if isinstance(tracker, Remembering) and name in state:
                tracker.load_state_dict(state[name])

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            if name in self._given_up:
                self._lost[name] += 1
                continue
            going = in_background(f"tracker {name}", call, tracker)
            try:
                going.result(self._deadline_s)
            except TimeoutError:
                if going.done():  # its own, of a connection
                    self._lose(name, going.exception())
                else:
                    self._give_up(name, tracker)
            except Exception as error:  # noqa: BLE001 - third-party code: a tracker never stops a run
                self._lose(name, error)

    def _lose(self, name: str, error: BaseException | None) -> None:
        if self._lost[name] == 0:
            said = (name, type(error).__name__, error)
            logger.warning("tracker %s failed, training goes on: %s: %s", *said, exc_info=error)
        self._lost[name] += 1

    def _give_up(self, name: str, tracker: Tracker) -> None:
        self._lost[name] += 1
        self._given_up.add(name)
        logger.warning(
            "tracker %s did not come back within %g s (trainer.timeouts.track_s) and is given up; training goes on",
            name, self._deadline_s,
        )  # fmt: skip
        if isinstance(tracker, Abandonable):
            tracker.abandon()


def clean_name(name: str) -> str:
    """``name`` as every backend takes it: letters, digits, ``_ - .`` and single inner slashes; ``@`` becomes ``_at_``.

    The empty result is ``unnamed``.
    """
    text = re.sub(r"[^A-Za-z0-9_\-./]+", "_", str(name).strip().replace("@", "_at_"))
    return re.sub(r"/{2,}", "/", text).strip("/") or "unnamed"


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Value]:
    """Metrics under cleaned names as plain ints, floats (NaN and infinities kept) and short texts.

    Mappings are flattened with slashes; one-element sequences, arrays and tensors are their element; longer ones of
    numbers become ``/mean``, ``/min`` and ``/max``; empty ones and None are left out; bools are 0 and 1; anything else
    is its text. Two names that become equal both stay: the later one gets ``_2``.
    """
    plain: dict[str, Value] = {}
    for name, value in _leaves(metrics, ""):
        cleaned, number = clean_name(name), 2
        unique = cleaned
        while unique in plain:
            unique, number = f"{cleaned}_{number}", number + 1
        plain[unique] = value
    return plain


def scalars(metrics: Mapping[str, Value]) -> dict[str, Scalar]:
    """The numbers among plain metrics."""
    return {name: value for name, value in metrics.items() if not isinstance(value, str)}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}/{key}" if name else str(key))
        return
    if not isinstance(value, (bool, int, float, str)) and hasattr(value, "tolist"):  # numpy and torch, unimported
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        yield from _sequence_leaves(value, name)
    elif isinstance(value, (bool, int)):
        yield name, int(value)
    elif isinstance(value, (float, str)):
        yield name, value
    elif value is not None:
        yield name, str(value)


def _sequence_leaves(values: Sequence[Any], name: str) -> Iterator[tuple[str, Value]]:
    while len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = values[0]
    if len(values) == 1:
        yield from _leaves(values[0], name)
        return
    flat = list(_flat(values))
    if not flat:
        return
    if all(isinstance(value, (bool, int, float)) for value in flat):
        yield f"{name}/mean", math.fsum(flat) / len(flat)
        # A NaN hides from min and max unless it comes first.
        broken = [value for value in flat if math.isnan(value)]
        yield f"{name}/min", broken[0] if broken else min(flat)
        yield f"{name}/max", broken[0] if broken else max(flat)
    else:
        yield name, str(values)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value.item() if hasattr(value, "item") else value


class JsonlTracker:
    """``metrics.jsonl`` in the run's folder: one object a step, written through at once; ``samples.jsonl`` beside it.

    NaN and infinities become null, so that every line is JSON. The first logged step ``s`` says which run it is: for
    ``s <= 1`` a new one (older files are moved aside), a later one goes on behind the lines before ``s`` (a torn last
    line and steps that are done again are dropped). A step that is logged twice is merged; kill -9 in between
    leaves the first.
    """

    def __init__(self, info: RunInfo) -> None:
        self._metrics = info.folder / METRICS_FILE
        self._samples = info.folder / SAMPLES_FILE
        self._settled = False
        self._last: tuple[int, int, dict[str, Any]] | None = None  # step, offset of its line, its object

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes or completes the line of ``step``."""
        self._settle(step)
        row = {"step": step, **finite(metrics)}
        if self._last is not None and self._last[0] == step:
            offset, row = self._last[1], {**self._last[2], **row}
        else:
            offset = self._metrics.stat().st_size if self._metrics.exists() else 0
        line = _line(row)
        before = _line(self._last[2]) if self._last is not None and self._last[0] == step else b""
        file = os.open(self._metrics, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            written = os.pwrite(file, line, offset)  # over the line that it replaces, in one call: it never disappears
            if written < len(line):  # a disk that is full takes a part of it
                os.ftruncate(file, offset + os.pwrite(file, before, offset))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._metrics))
            os.ftruncate(file, offset + len(line))
        finally:
            os.close(file)
        self._last = (step, offset, row)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Appends one object a sample."""
        self._settle(step)
        with open(self._samples, "a") as file:
            for sample in samples:
                file.write(json.dumps(finite({"step": step, **sample}), default=str) + "\n")

    def finish(self) -> None:
        """Nothing to do: every line is already written."""

    def _settle(self, first_step: int) -> None:
        if self._settled:
            return
        self._settled = True
        for path in (self._metrics, self._samples):
            if not path.exists():
                continue
            if first_step <= 1:
                path.rename(_free_name(path))
                continue
            lines = path.read_bytes().splitlines()
            kept = [line for line in lines if _step_of(line) < first_step]
            if path == self._metrics:
                _tell_missing(path, {int(_step_of(line)) for line in kept}, first_step)
            rest = path.with_suffix(".tmp")
            rest.write_bytes(b"".join(line + b"\n" for line in kept))
            os.replace(rest, path)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _step_of(line: bytes) -> float:
    """Step of a line of the file; infinite for a torn one."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _tell_missing(path: Path, kept: set[int], first_step: int) -> None:
    """Warns when the file lacks lines of steps that are not done again: it was cut, or is of another run."""
    missing = sorted(set(range(1, first_step)) - kept)
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
        logger.warning("%s lacks the lines of %d steps before step %d: %s", path, len(missing), first_step, shown)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.old-{number}{path.suffix}")).exists():
        number += 1
    return candidate


def finite(value: Any) -> Any:
    """``value`` with None for every number that JSON has no word for: the score of a failed sample is NaN."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


TRACKERS: dict[str, str] = {
    "console": "hybridflow.trainer.progress:ConsoleTracker",
    "jsonl": "hybridflow.trainer.tracking:JsonlTracker",
    "tensorboard": "hybridflow.trainer.tracking_tensorboard:TensorBoardTracker",
    "wandb": "hybridflow.trainer.tracking_wandb:WandbTracker",
}
"""By name: a class that takes a ``RunInfo``. A new one is a file and a line here (and a word in config/choices)."""
