"""Rows of text for PPO-ptx, drawn by every rank from (seed, step, mini-batch): nothing travels, nothing is saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.pretraining import WEIGHT
from hybridflow.batch.batch import Batch, concat
from hybridflow.config.root import PPOConfig
from hybridflow.data.pretraining import text_blocks
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.utils.seeding import derive_seed


class Pretraining:
    """Joins blocks of text to mini-batches.

    Args:
        blocks: token ids of every block, at least two each.
        size: blocks per mini-batch over all ranks.
        seed: of the run.
        coordinate: this rank's data-parallel coordinate; its ranks get the same rows.
        coordinates: how many there are.
    """

    def __init__(
        self, blocks: Sequence[Sequence[int]], *, size: int, seed: int, coordinate: int, coordinates: int
    ) -> None:
        self._blocks = blocks
        self._size = size
        self._seed = seed
        self._coordinate = coordinate
        self._coordinates = coordinates

    def join(self, rows: Batch, *, step: int, number: int) -> Batch:
        """``rows`` of mini-batch ``number`` with this rank's share of its text behind them, and ``ptx_weight``."""
        drawn = self._draw(step, number)
        tokens = sum(len(block) - 1 for block in drawn)
        own = text_rows(drawn[self._coordinate :: self._coordinates], like=rows, weight=1.0 / tokens)
        none = torch.zeros(rows["response_ids"].shape, dtype=torch.float32)
        return concat([Batch({**rows.tensors(), WEIGHT: none}), own])

    def _draw(self, step: int, number: int) -> list[Sequence[int]]:
        """The mini-batch's blocks, none twice while there are enough."""
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "ptx", step, number))
        count = len(self._blocks)
        if self._size <= count:
            order = torch.randperm(count, generator=generator)[: self._size]
        else:
            order = torch.randint(count, (self._size,), generator=generator)
        return [self._blocks[i] for i in order.tolist()]


def load_pretraining(
    config: PPOConfig, tokenizer_path: str, *, size: int, coordinate: int, coordinates: int
) -> Pretraining:
    """``algorithm.ptx_files`` as blocks; ``size``: blocks of a mini-batch where ``ptx_batch_size`` is not given."""
    settings, model = config.algorithm, config.actor_rollout_ref.model
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=model.trust_remote_code)
    length = settings.ptx_length or config.prompt_length + config.response_length
    return Pretraining(
        text_blocks(settings.ptx_files, tokenizer, length=length),
        size=settings.ptx_batch_size or size,
        seed=config.trainer.seed,
        coordinate=coordinate,
        coordinates=coordinates,
    )


def text_rows(blocks: Sequence[Sequence[int]], *, like: Batch, weight: float) -> Batch:
    """One row per block with the tensor columns of ``like``: its first token is the prompt, the rest the response.

    All further columns are zero, masks False.
    """
    count, width = len(blocks), max((len(block) - 1 for block in blocks), default=1)
    columns: dict[str, Tensor] = {}
    for name, value in like.tensors().items():
        shape = (count, width) if value.ndim == 2 and name != "prompt_ids" else (count, *value.shape[1:])
        columns[name] = value.new_zeros(shape)
    length = torch.tensor([len(block) - 1 for block in blocks], dtype=torch.long)
    ids = torch.zeros(count, width, dtype=torch.long)
    for i, block in enumerate(blocks):
        ids[i, : len(block) - 1] = torch.tensor(block[1:], dtype=torch.long)
    written = torch.arange(width)[None, :] < length[:, None]
    return Batch(
        {
            **columns,
            "prompt_ids": torch.tensor([[block[0]] for block in blocks], dtype=torch.long).reshape(count, 1),
            "prompt_length": torch.ones(count, dtype=torch.long),
            "response_ids": ids,
            "response_length": length,
            WEIGHT: torch.where(written, weight, 0.0),
        }
    )
