"""``PromptDataset``: rows and their prompt ids, over-long ones dropped or cut once, before the run starts."""

from __future__ import annotations

import hashlib
import itertools
import logging
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from hybridflow.batch.batch import Batch
from hybridflow.config.choices import TRUNCATIONS
from hybridflow.config.data import DataConfig
from hybridflow.data.sources import PromptRow, load_rows
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer, truncate
from hybridflow.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_BLOCK_ROWS = 1024
_PROGRESS_S = 5.0


class PromptDataset:
    """Encoded prompts, one per row; immutable.

    Args:
        rows: what was read.
        prompt_ids: ids of each row.
        row_ids: position of each row in the source before any filter, which seeds of validation depend on.
        dropped: rows that a filter took out.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        prompt_ids: Sequence[list[int]],
        *,
        row_ids: Sequence[int],
        dropped: int,
        pad_id: int,
    ) -> None:
        self.rows = tuple(rows)
        self.dropped = dropped
        self._starts = np.cumsum([0, *map(len, prompt_ids)])
        self._ids = np.fromiter(itertools.chain.from_iterable(prompt_ids), np.int32, self._starts[-1])
        self._row_ids = tuple(row_ids)
        self._pad_id = pad_id

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; 0 without rows."""
        return int(np.diff(self._starts).max(initial=0))

    def fingerprint(self) -> str:
        """A hash of all prompts, their order, scorers and ground truths: the same exactly for the same dataset."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(self._starts.tobytes() + self._ids.tobytes(), digest_size=16)
        for row in self.rows:
            digest.update(repr((row.data_source, row.ground_truth)).encode())
        return digest.hexdigest()

    def batch(self, positions: Sequence[int], *, group_ids: Sequence[int]) -> Batch:
        """The columns that "data" writes (batch/columns.py), for the rows at ``positions``; prompts padded right."""
        rows = [self.rows[i] for i in positions]
        starts, ends = self._starts[list(positions)], self._starts[[i + 1 for i in positions]]
        lengths = ends - starts
        padded = np.full((len(rows), lengths.max(initial=0)), self._pad_id, dtype=np.int64)
        for row, start, end in zip(padded, starts, ends, strict=True):
            row[: end - start] = self._ids[start:end]
        return Batch(
            {
                "prompt_ids": torch.from_numpy(padded),
                "prompt_length": torch.from_numpy(lengths),
                "group_id": torch.tensor(group_ids, dtype=torch.int64),
                "row_id": torch.tensor([self._row_ids[i] for i in positions], dtype=torch.int64),
                "data_source": [row.data_source for row in rows],
                "ground_truth": [row.ground_truth for row in rows],
                "extra_info": [dict(row.extra_info) for row in rows],
                "raw_prompt": [row.prompt if isinstance(row.prompt, str) else list(row.prompt) for row in rows],
            }
        )


def build_datasets(config: DataConfig, tokenizer: Tokenizer, seed: int) -> tuple[PromptDataset, PromptDataset]:
    """Training and validation prompts of ``data.*``, encoded. ``data.seed`` wins over ``seed``.

    Raises:
        DataError: bad file, row or column; an over-long prompt under truncation ``error``; no training row left.
    """
    seed = seed if config.seed is None else config.seed
    train_rows, val_rows = load_rows(config, seed=seed)
    train = encode_rows(train_rows, tokenizer, config, "data.train_files")
    val = encode_rows(val_rows, tokenizer, config, "data.val_files")
    if not train:
        raise DataError(
            f"no training prompt is left: data.train_files={list(config.train_files)} gave {len(train_rows)} rows, "
            f"{train.dropped} of them longer than data.max_prompt_length={config.max_prompt_length}"
        )
    return train, val


def encode_rows(rows: Sequence[PromptRow], tokenizer: Tokenizer, config: DataConfig, what: str) -> PromptDataset:
    """A dataset of ``rows``; over-long prompts are dropped and counted, or cut, as ``data.*`` says."""
    if config.truncation not in TRUNCATIONS:
        raise ConfigError(f"data.truncation={config.truncation!r}: one of {', '.join(TRUNCATIONS)} is expected")
    limit, kept, row_ids = config.max_prompt_length, [], []
    for row_id, ids in enumerate(_encode(rows, tokenizer, config, what)):
        if len(ids) > limit and config.filter_overlong_prompts:
            continue
        if not ids:
            raise DataError(f"{rows[row_id].where}: the prompt has no token")
        begins = tokenizer.bos_id is not None
        kept.append(truncate(ids, limit, config.truncation, keep_first=begins, where=rows[row_id].where))
        row_ids.append(row_id)
    dropped = len(rows) - len(kept)
    if dropped:
        logger.warning(
            "%s: %d of %d prompts are longer than %d tokens and were dropped", what, dropped, len(rows), limit
        )
    return PromptDataset(
        [rows[i] for i in row_ids], kept, row_ids=row_ids, dropped=dropped, pad_id=tokenizer.pad_id
    )  # fmt: skip


def _encode(rows: Sequence[PromptRow], tokenizer: Tokenizer, config: DataConfig, what: str) -> Iterator[list[int]]:
    """Ids of every row in order, in this process or in ``data.filter_overlong_prompts_workers`` others."""
    blocks = [rows[i : i + _BLOCK_ROWS] for i in range(0, len(rows), _BLOCK_ROWS)]
    workers = min(config.filter_overlong_prompts_workers, len(blocks))
    template = dict(config.apply_chat_template_kwargs)
    if workers <= 1:
        yield from _with_progress(map(partial(_encode_block, tokenizer, template), blocks), len(rows), what)
        return
    trust = config.trust_remote_code
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        encode = partial(_encode_elsewhere, tokenizer.source, trust, template)
        yield from _with_progress(pool.map(encode, blocks), len(rows), what)


def _with_progress(blocks: Iterator[list[list[int]]], total: int, what: str) -> Iterator[list[int]]:
    done, next_word = 0, time.monotonic() + _PROGRESS_S
    for block in blocks:
        yield from block
        done += len(block)
        if time.monotonic() > next_word:
            logger.info("%s: %d of %d prompts encoded", what, done, total)
            next_word = time.monotonic() + _PROGRESS_S


def _encode_block(tokenizer: Tokenizer, template: dict[str, Any], rows: Sequence[PromptRow]) -> list[list[int]]:
    texts = []
    for row in rows:
        try:
            texts.append(tokenizer.render(row.prompt, **template))
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
    return tokenizer.encode_text(texts)


def _encode_elsewhere(source: str, trust: bool, template: dict[str, Any], rows: Sequence[PromptRow]) -> list[list[int]]:
    return _encode_block(_tokenizer_of_process(source, trust), template, rows)


def _tokenizer_of_process(source: str, trust: bool) -> Tokenizer:
    if (source, trust) not in _TOKENIZERS:
        _TOKENIZERS[source, trust] = load_tokenizer(source, trust)
    return _TOKENIZERS[source, trust]


_TOKENIZERS: dict[tuple[str, bool], Tokenizer] = {}
"""One per encoding process: loading takes longer than a block of rows."""
