"""Rows from files and generators, in one shape, judged as they are read. Torch-free.

A source is a parquet, json or jsonl file, or a generator by name:

    builtin:arithmetic
    reasoning_gym:chain_sum?max_terms=2&max_digits=2&size=2048&seed=7&instruction=Answer with the number only.

Columns are those that verl's users have: ``prompt`` (text or a chat list), ``data_source``, ``reward_model`` with
``ground_truth`` inside (or ``ground_truth`` itself), ``extra_info``. ``data.custom_cls`` names the user's own reader:
``name(source, config=, held_out=)``, a class or function that gives an iterable of such rows.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hybridflow.config.data import BUILTIN_TASK, DataConfig
from hybridflow.data.builtin import arithmetic_rows
from hybridflow.utils.errors import DataError
from hybridflow.utils.optional import load, load_from_file

logger = logging.getLogger(__name__)

REASONING_PREFIX = "reasoning_gym:"
READERS = {
    ".parquet": "hybridflow.data.parquet:read_parquet",
    ".jsonl": "hybridflow.data.sources:read_jsonl",
    ".json": "hybridflow.data.sources:read_json",
}
"""Readers of files by their ending: path to rows."""

GENERATED_COLUMNS = DataConfig()
"""``data.prompt_key`` and ``data.reward_fn_key`` name columns of files; generated rows have the usual ones."""

_DRAWS_PER_QUESTION = 20
"""How often a procedural task is asked before it is said to have too few different questions."""
_HELD_OUT_SEED = 1_000_003
"""Seed of held-out procedural questions: the same in every run, so that runs compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt and what its scorer needs."""

    prompt: str | tuple[Mapping[str, Any], ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    where: str
    """File and row, for messages."""


@dataclass(slots=True, kw_only=True)
class Look:
    """How much of a source is read to judge it early: some rows, and more while it costs little."""

    rows: int
    """Read in any case."""
    cpu_s: float = 0.0
    """Seconds of processor time in which further rows are read."""
    whole: bool = True
    """Whether all that was looked at was read to its end."""

    def take(self, raw: Iterable[Any]) -> Iterator[Any]:
        """Rows of ``raw`` as far as they are read."""
        start = time.process_time()
        for number, row in enumerate(raw):
            if number >= self.rows and time.process_time() - start >= self.cpu_s:
                self.whole = False
                return
            yield row


def load_rows(config: DataConfig, *, seed: int) -> tuple[list[PromptRow], list[PromptRow]]:
    """Training and validation rows of ``data.*``.

    Training questions of a generator exclude those of the validation set.

    Raises:
        DataError: names file, row and column.
    """
    held_out = read_sources(config.val_files, config, seed=seed, held_out=True)
    asked = frozenset(prompt_key(row.prompt) for row in held_out)
    train = read_sources(config.train_files, config, seed=seed, held_out=False, exclude=asked)
    return train, held_out


def read_sources(
    sources: Sequence[str],
    config: DataConfig,
    *,
    seed: int,
    held_out: bool,
    exclude: frozenset[str] = frozenset(),
    look: Look | None = None,
) -> list[PromptRow]:
    """Rows of all ``sources`` in order, the first ``data.train_max_samples`` (``val_max_samples``) of them.

    ``look``: of each source, only so much is read; None: all of it.
    """
    rows: list[PromptRow] = []
    for source in sources:
        if config.custom_cls.path is not None:
            raw = _rows_of_user(source, config, held_out=held_out)
        else:
            raw = _raw_rows(source, config, seed=seed, held_out=held_out, exclude=exclude)
        read = raw if look is None else look.take(raw)
        columns = GENERATED_COLUMNS if config.custom_cls.path is None and is_generated(source) else config
        rows += [_parse(row, f"{source} row {i}", columns) for i, row in enumerate(read)]
    most = config.val_max_samples if held_out else config.train_max_samples
    rows = rows if most < 0 else rows[:most]
    _warn_of_empty_truths(rows)
    return rows


def is_generated(source: str) -> bool:
    """Whether ``source`` names a generator in place of a file."""
    return source == BUILTIN_TASK or source.startswith(REASONING_PREFIX)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file with one json object a line; empty lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path} line {number}"
                yield _json(_text(line, where), where)


def read_json(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file that is one json list of objects (or, as some files are, one object a line)."""
    text = _text(path.read_bytes(), str(path))
    if text.lstrip().startswith("["):
        return iter(_json(text, str(path)))
    try:
        return iter([json.loads(text)])
    except json.JSONDecodeError:  # more than one object, or none
        return read_jsonl(path)


def prompt_key(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A string that two prompts share exactly when they ask the same."""
    return prompt if isinstance(prompt, str) else json.dumps([dict(m) for m in prompt], sort_keys=True, default=str)


def _raw_rows(
    source: str, config: DataConfig, *, seed: int, held_out: bool, exclude: frozenset[str]
) -> Iterable[dict[str, Any]]:
    size = config.generated_val_size if held_out else config.generated_size
    if source == BUILTIN_TASK:
        return arithmetic_rows(size, seed=seed, held_out=held_out)
    if source.startswith(REASONING_PREFIX):
        return _reasoning_rows(source, size=size, seed=_HELD_OUT_SEED if held_out else seed, exclude=exclude,
                               distinct=held_out)  # fmt: skip
    path = Path(source).expanduser()
    if path.suffix not in READERS:
        raise DataError(f"{source!r} is no data source: a file that ends in {', '.join(READERS)}, {BUILTIN_TASK}, "
                        f"or {REASONING_PREFIX}<task>")  # fmt: skip
    if not path.is_file():
        raise DataError(f"data file {source} does not exist (looked for {path.resolve()})")
    return load(READERS[path.suffix])(path)


def _rows_of_user(source: str, config: DataConfig, *, held_out: bool) -> Iterable[Any]:
    """What the user's own class or function gives for one of ``data.train_files`` or ``data.val_files``."""
    own = config.custom_cls
    if own.path is None or own.name is None:
        raise DataError("data.custom_cls needs both path and name")
    return load_from_file(own.path, own.name)(source, config=config, held_out=held_out)


def _reasoning_rows(
    source: str, *, size: int, seed: int, exclude: frozenset[str], distinct: bool
) -> Iterator[dict[str, Any]]:
    task, _, query = source.removeprefix(REASONING_PREFIX).partition("?")
    parameters = _parameters(query, source)
    size = _whole(parameters.pop("size", size), f"{source} size")
    seed = _whole(parameters.pop("seed", seed), f"{source} seed")
    stream = load("hybridflow.data.reasoning_tasks:question_stream")
    seen, given = set(exclude), 0
    for row in stream(task, parameters, seed=seed, size=size * _DRAWS_PER_QUESTION):
        key = prompt_key(row["prompt"])
        if key in seen:
            continue
        if distinct:
            seen.add(key)
        yield row
        given += 1
        if given == size:
            return
    raise DataError(
        f"{source}: {size} questions are asked for, but {size * _DRAWS_PER_QUESTION} draws gave only {given} that are "
        "new and not held out: lower its size or data.generated_val_size, or widen the task's parameters"
    )


def _parameters(query: str, source: str) -> dict[str, str]:
    """``name=value&name=value`` as a dict; percent escapes are read (%26 is an ampersand), a plus stays a plus."""
    parts = [part.partition("=") for part in query.split("&")] if query else []
    for name, equals, _ in parts:
        if not name or not equals:
            raise DataError(f"{source}: name=value&name=value is expected after the question mark, not {name!r}")
    return {name: unquote(value) for name, _, value in parts}


def _parse(row: Any, where: str, config: DataConfig) -> PromptRow:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is a {type(row).__name__}, an object with columns is expected")
    source = _required(row, config.reward_fn_key, where)
    if not isinstance(source, str) or not source:
        raise DataError(f"{where}, column {config.reward_fn_key!r}: the scorer's name is expected, got {source!r}")
    return PromptRow(
        prompt=_prompt(_required(row, config.prompt_key, where), f"{where}, column {config.prompt_key!r}"),
        data_source=source,
        ground_truth=_ground_truth(row, where),
        extra_info=_extra_info(row.get("extra_info"), f"{where}, column 'extra_info'"),
        where=where,
    )


def _required(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in row:
        raise DataError(f"{where} has no column {column!r}; it has {', '.join(sorted(map(str, row))) or 'none'}")
    return row[column]


def _prompt(value: Any, where: str) -> str | tuple[Mapping[str, Any], ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        for i, message in enumerate(value):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise DataError(
                    f"{where}, message {i}: an object with role and content is expected, got {_short(message)}"
                )
            _judge_message(message, f"{where}, message {i}")
        # Parquet fills keys that only some messages have with None, which templates would print.
        return tuple({key: item for key, item in message.items() if item is not None} for message in value)
    raise DataError(f"{where}: a text or a chat list of {{role, content}} is expected, got {_short(value)}")


def _judge_message(message: Mapping[str, Any], where: str) -> None:
    """Roles and contents that chat templates have no place for."""
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        raise DataError(f"{where}: role is a text, got {_short(role)}")
    if isinstance(content, Sequence) and not isinstance(content, str):
        kinds = {part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content}
        if kinds != {"text"}:
            others = ", ".join(sorted(map(str, kinds - {"text"}))) or "nothing"
            raise DataError(f"{where}: models and prompts are text only, content has {others}")
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"{where}: content is a text, got {_short(content)}")


def _ground_truth(row: Mapping[str, Any], where: str) -> Any:
    if "ground_truth" in row:
        return row["ground_truth"]
    reward_model = _required(row, "reward_model", where)
    if isinstance(reward_model, str) and re.match(r"\s*\{", reward_model):
        reward_model = _json(reward_model, f"{where}, column 'reward_model'")
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise DataError(f"{where}, column 'reward_model': an object with ground_truth is expected, got "
                        f"{_short(reward_model)}")  # fmt: skip
    return reward_model["ground_truth"]


def _extra_info(value: Any, where: str) -> Mapping[str, Any]:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: an object is expected, got {_short(value)}")
    return dict(value)


def _warn_of_empty_truths(rows: Sequence[PromptRow]) -> None:
    empty = [row.where for row in rows if row.ground_truth is None or row.ground_truth in ("", [])]
    if empty:
        logger.warning(
            "%d rows have an empty ground truth (first: %s): built-in scorers call their samples failed, never right",
            len(empty),
            empty[0],
        )


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not utf-8 text: {error.reason} at byte {error.start}") from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not valid json: {error.msg} at character {error.pos}") from error


def _whole(value: str | int, where: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise DataError(f"{where}={value}: a whole number is expected") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
