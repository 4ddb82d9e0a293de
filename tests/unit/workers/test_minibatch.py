"""Mini-batch membership depends on a row's global position alone."""

from __future__ import annotations

import pytest
import torch

from hybridflow.batch.batch import Batch, concat
from hybridflow.workers.minibatch import micro_batching, mini_batch_index, mini_batches


def _blocks(rows: Batch, **overrides: object) -> list[list[int]]:
    settings = dict(total_rows=12, mini_rows=6, group_size=3, epochs=1, shuffle_seed=None)
    return [block["row_index"].tolist() for block in mini_batches(rows, **{**settings, **overrides})]


def test_rows_keep_their_order_and_every_row_is_in_exactly_one_mini_batch_per_epoch():
    rows = Batch({"row_index": torch.arange(12)})
    assert _blocks(rows, epochs=2) == [list(range(6)), list(range(6, 12))] * 2


@pytest.mark.parametrize("shuffle_seed", [None, 7])
@pytest.mark.parametrize("parts", [[12], [6, 6], [5, 4, 3], [12, 0]])
def test_membership_is_the_same_however_rows_are_split_over_ranks(parts, shuffle_seed):
    whole = _blocks(Batch({"row_index": torch.arange(12)}), shuffle_seed=shuffle_seed, epochs=2)
    ranks = Batch({"row_index": torch.arange(12)}).split(parts)
    per_rank = [_blocks(rank, shuffle_seed=shuffle_seed, epochs=2) for rank in ranks]
    joined = [sorted(row for rank in per_rank for row in rank[k]) for k in range(len(whole))]
    assert joined == [sorted(block) for block in whole]


def test_a_shuffle_moves_whole_groups_and_another_epoch_another_order():
    blocks = mini_batch_index(24, 6, 3, seed=3)
    assert all(len(set(blocks[i : i + 3].tolist())) == 1 for i in range(0, 24, 3))
    assert torch.bincount(blocks).tolist() == [6, 6, 6, 6]
    assert not torch.equal(blocks, mini_batch_index(24, 6, 3, seed=4))


def test_rows_lost_at_run_time_make_the_last_mini_batch_smaller():
    assert torch.bincount(mini_batch_index(10, 6, 2, seed=None)).tolist() == [6, 4]
    assert torch.bincount(mini_batch_index(10, 6, 2, seed=1)).tolist() == [6, 4]


def test_pad_rows_of_the_transfer_follow_the_row_they_copy():
    rows = concat([Batch({"row_index": torch.arange(3)}), Batch({"row_index": torch.tensor([0])})])
    assert _blocks(rows, total_rows=3, mini_rows=2, group_size=1) == [[0, 1, 0], [2]]


def test_a_token_budget_counts_every_sequence_parallel_rank():
    assert micro_batching(dynamic=True, tokens_per_device=100, rows=4, sp=2).max_tokens == 200
    assert micro_batching(dynamic=False, tokens_per_device=100, rows=4, sp=2).max_rows == 4
    assert micro_batching(dynamic=False, tokens_per_device=100, rows=None, sp=1).max_tokens == 100
