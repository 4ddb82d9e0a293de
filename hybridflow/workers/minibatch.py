"""Which rows make which optimizer step, decided from a row's global position alone.

A worker sees only its share of the batch. Mini-batch k of an epoch is the k-th block of ``mini_rows`` positions of a
permutation of all positions, so membership is the same for every number of ranks. With ``shuffle`` whole groups (the
``group_size`` samples of one prompt, neighbours in the batch) are permuted; rows lost at run time make the last
mini-batch smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.engines.train.base import MicroBatching


def mini_batches(
    rows: Batch,
    *,
    total_rows: int,
    mini_rows: int,
    group_size: int,
    epochs: int,
    shuffle_seed: int | None,
) -> Iterator[Batch]:
    """This rank's rows of every mini-batch of every epoch, in order; a block may be empty here and not elsewhere.

    Args:
        rows: must hold ``row_index``; pad rows of the transfer repeat an index and carry an all-False mask.
        total_rows: rows of the whole batch over all ranks.
        mini_rows: rows of a mini-batch over all ranks.
        group_size: samples per prompt.
        epochs: passes over the batch.
        shuffle_seed: None keeps the order.
    """
    index = rows["row_index"]
    for epoch in range(epochs):
        seed = None if shuffle_seed is None else shuffle_seed + epoch
        block = mini_batch_index(total_rows, mini_rows, group_size, seed)
        mine = block[index]
        for k in range(-(-total_rows // mini_rows)):
            yield rows.rows((mine == k).nonzero().squeeze(1))


def mini_batch_index(total_rows: int, mini_rows: int, group_size: int, seed: int | None) -> Tensor:
    """Mini-batch number of every row position, ``[total_rows]``."""
    if seed is None:
        return torch.arange(total_rows) // mini_rows
    groups = -(-total_rows // group_size)
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    place = torch.randperm(groups, generator=generator)
    rank = torch.empty(groups, dtype=torch.long)
    rank[place] = torch.arange(groups)
    position = rank[torch.arange(total_rows) // group_size] * group_size + torch.arange(total_rows) % group_size
    return torch.argsort(torch.argsort(position)) // mini_rows


def micro_batching(*, dynamic: bool | None, tokens_per_device: int, rows: int | None, sp: int) -> MicroBatching:
    """Token budget (``tokens_per_device`` x sp) or row count, as the role's configuration says."""
    if dynamic or rows is None:
        return MicroBatching(max_tokens=tokens_per_device * sp)
    return MicroBatching(max_rows=rows)
