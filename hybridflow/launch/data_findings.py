"""What the data files say before the run: schema and rows, as many as are read in a moment (most files: all).

What is not read here is read when the run starts, and so are the exact lengths of all prompts.
"""

from __future__ import annotations

import heapq
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.checks import is_generated
from hybridflow.config.data import BUILTIN_TASK
from hybridflow.config.root import PPOConfig
from hybridflow.data.builtin import SHIPPED_MODEL
from hybridflow.data.sources import READERS, Look, PromptRow, read_sources
from hybridflow.launch.hf_model import find_folder
from hybridflow.launch.model_files import has_chat_template
from hybridflow.launch.paths import similar
from hybridflow.launch.plan import Finding
from hybridflow.rewards.registry import find_scorer
from hybridflow.utils.errors import ConfigError, DataError
from hybridflow.utils.optional import load

JUDGED_ROWS = 1000
"""Rows of a file that are read and whose prompts are counted in tokens."""
FURTHER_S = 0.5
"""Processor time in which further rows are read, of all files together: some 30,000, which is all of most."""
LONGEST_ROWS = 100
"""Prompts with most characters, among those further rows, that are counted where one too long is an error."""
ROLES = ("system", "user", "assistant", "tool", "developer")
"""Roles of messages that chat templates know."""


def check_data(config: PPOConfig) -> Iterator[Finding]:
    """Findings on every source of ``data.train_files`` and ``data.val_files``."""
    if config.data.custom_cls.path is not None:
        return
    start = time.process_time()
    for held_out, sources in ((False, config.data.train_files), (True, config.data.val_files)):
        key = "data.val_files" if held_out else "data.train_files"
        rows: list[PromptRow] = []
        whole = True
        for source in sources:
            if is_generated(source):
                yield _generated(config, source, key, held_out)
                whole = False
                continue
            spent_s = time.process_time() - start
            look = Look(rows=max(JUDGED_ROWS, config.data.train_batch_size), cpu_s=max(0.0, FURTHER_S - spent_s))
            finding, read = _read(config, source, key, held_out, look)
            yield finding
            rows += read
            whole = whole and finding.level == "ok" and look.whole
        if rows:
            yield from _judge(config, key, rows, whole=whole, held_out=held_out)


def _generated(config: PPOConfig, source: str, key: str, held_out: bool) -> Finding:
    """Whether the generator exists and takes its options; asked for one row."""
    if source.startswith("reasoning_gym:") and importlib.util.find_spec("reasoning_gym") is None:
        return Finding(level="ok", what=key, text=f"{source} is generated, by a package that is not judged here")
    try:
        read_sources((source,), config.data, seed=config.trainer.seed, held_out=held_out, look=Look(rows=1))
    except (ConfigError, DataError) as error:
        fix = "Use builtin:arithmetic or reasoning_gym:TASK."
        return Finding(level="error", what=key, text=str(error).rstrip("."), fix=fix)
    return Finding(level="ok", what=key, text=f"{source} is generated")


def _read(config: PPOConfig, source: str, key: str, held_out: bool, look: Look) -> tuple[Finding, list[PromptRow]]:
    file = Path(source).expanduser()
    if not file.is_file():
        text = f"{source} is no file" if file.exists() else f"{source} does not exist"
        fix = f"{similar(source)} A file, builtin:arithmetic or reasoning_gym:TASK is expected."
        return Finding(level="error", what=key, text=text, fix=fix), []
    if file.suffix not in READERS:
        fix = f"Use a file that ends in {', '.join(READERS)}."
        return Finding(level="error", what=key, text=f"{source} has an ending that no reader knows", fix=fix), []
    if file.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        text = "package pyarrow is not installed, and parquet needs it"
        return Finding(level="error", what=key, text=text, fix="Install hybridflow[data], or use jsonl."), []
    try:
        rows = read_sources((source,), config.data, seed=0, held_out=held_out, look=look)
    except (DataError, OSError, ValueError) as error:
        named = "has no column" in str(error)
        fix = "data.prompt_key and data.reward_fn_key name the columns." if named else "Correct the file."
        return Finding(level="error", what=key, text=str(error).rstrip("."), fix=fix), []
    if not rows:
        return Finding(level="error", what=key, text=f"{source} has no row", fix="Give a file with prompts."), []
    count = f"{len(rows):,} rows" if look.whole else f"the first {len(rows):,} rows"
    return Finding(level="ok", what=key, text=f"{count} of {source} have the columns that are needed"), rows


def _judge(config: PPOConfig, key: str, rows: Sequence[PromptRow], *, whole: bool, held_out: bool) -> Iterator[Finding]:
    data = config.data
    yield from _scorers(config, key, rows)
    yield from _chats(config, key, rows)
    length = _least_length(config)
    survivors = len(rows)
    if length is not None:
        lengths = length(_counted(config, rows))
        if data.filter_overlong_prompts and min(lengths) > data.max_prompt_length:  # those behind them may be shorter
            lengths += length([_text(row) for row in rows[len(lengths) :]])
        over = sum(tokens > data.max_prompt_length for tokens in lengths)
        yield from _over_long(config, lengths, over, key, whole=whole and len(lengths) == len(rows))
        survivors -= over if data.filter_overlong_prompts else 0
    if whole and not held_out and 0 < survivors < data.train_batch_size:
        text = f"{survivors} prompts cannot fill one step of data.train_batch_size={data.train_batch_size}"
        dropped = (
            f" ({len(rows) - survivors} of {len(rows)} are over data.max_prompt_length)"
            if survivors < len(rows)
            else ""
        )
        fix = f"Use data.train_batch_size={survivors} or less, or more data."
        yield Finding(level="error", what="data.train_batch_size", text=text + dropped, fix=fix)


def _counted(config: PPOConfig, rows: Sequence[PromptRow]) -> list[str]:
    """Prompts whose tokens are counted: the first ones, and the longest of the others where one may end the run."""
    first, rest = rows[:JUDGED_ROWS], rows[JUDGED_ROWS:]
    ends_run = config.data.truncation == "error" and not config.data.filter_overlong_prompts
    longest = heapq.nlargest(LONGEST_ROWS, map(_text, rest), key=len) if ends_run else []
    return [*map(_text, first), *longest]


def _over_long(config: PPOConfig, lengths: list[int], over: int, key: str, *, whole: bool) -> Iterator[Finding]:
    data = config.data
    limit = "data.max_prompt_length"
    if over == 0:
        return
    share = f"{over} of {len(lengths)} judged prompts of {key} have more than {limit}={data.max_prompt_length} tokens"
    if data.filter_overlong_prompts and over == len(lengths):
        text = f"{share}: nothing is left after the filter"
        fix = f"Use {limit}={max(lengths)} or more."
        yield Finding(level="error" if whole else "warning", what=limit, text=text, fix=fix)
    elif data.filter_overlong_prompts:
        yield Finding(level="ok", what=limit, text=f"{share} and will be left out")
    elif data.truncation == "error":
        fix = f"Set data.filter_overlong_prompts=True, data.truncation=left, or {limit}={max(lengths)}."
        yield Finding(level="error", what=limit, text=f"{share} and data.truncation=error", fix=fix)
    else:
        text = f"{share} and will be cut ({data.truncation})"
        yield Finding(level="warning", what=limit, text=text, fix="Raise the limit to keep them whole.")


def _scorers(config: PPOConfig, key: str, rows: Sequence[PromptRow]) -> Iterator[Finding]:
    if config.reward.custom_reward_function.path is not None or config.reward.reward_model.enable:
        return
    for name in dict.fromkeys(row.data_source for row in rows):
        try:
            find_scorer(name)
        except ConfigError as error:
            text = f"{key}: {str(error).partition(';')[0]}"
            fix = "Set reward.custom_reward_function.path=FILE.py."
            yield Finding(level="error", what="reward.custom_reward_function.path", text=text, fix=fix)


def _chats(config: PPOConfig, key: str, rows: Sequence[PromptRow]) -> Iterator[Finding]:
    """What a chat template would stumble over."""
    chats = [(row, row.prompt) for row in rows if not isinstance(row.prompt, str)]
    if not chats:
        return
    model = config.actor_rollout_ref.model
    path = model.tokenizer_path or model.path
    folder = SHIPPED_MODEL if path == BUILTIN_TASK else find_folder(path)
    if folder is not None and not has_chat_template(folder):
        text = f"{chats[0][0].where} is a chat, and the tokenizer of {path} has no chat template"
        fix = "Use a prompt column of plain text, or an instruct model."
        yield Finding(level="error", what=key, text=text, fix=fix)
    odd = next(((row, message) for row, chat in chats for message in chat if message["role"] not in ROLES), None)
    if odd is not None:
        text = f"{odd[0].where} has a message of the role {odd[1]['role']!r}, which few chat templates know"
        fix = f"Roles are {', '.join(ROLES)}."
        yield Finding(level="warning", what=key, text=text, fix=fix)


def _text(row: PromptRow) -> str:
    """What the user's words make of a prompt; a chat template only adds to it."""
    if isinstance(row.prompt, str):
        return row.prompt
    return "".join(message["content"] for message in row.prompt if isinstance(message.get("content"), str))


def _least_length(config: PPOConfig) -> Callable[[list[str]], list[int]] | None:
    """A function from texts to the fewest tokens each can have; None: the tokenizer cannot be read without torch."""
    model = config.actor_rollout_ref.model
    path = model.tokenizer_path or model.path
    if path == BUILTIN_TASK:
        return lambda texts: [len(text) for text in texts]
    folder = find_folder(path)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    tokenizer: Any = load("tokenizers:Tokenizer").from_file(str(folder / "tokenizer.json"))
    return lambda texts: [len(code.ids) for code in tokenizer.encode_batch(texts, add_special_tokens=False)]
