"""Handles reorder rows for balance and put results back; which mini-batch a row is in never changes."""

from __future__ import annotations

import pytest
import torch

from hybridflow.batch.balance import row_cost
from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import Pending, Ready, gather
from hybridflow.roles.handles import ActorHandle, balanced_order, combine_ranks, shared_costs, shared_order


def test_each_rank_gets_one_long_row_and_equally_many_rows():
    order = balanced_order([10, 1, 1, 1, 1, 1, 1, 10], parts=2, block_rows=8)
    chunks = [set(chunk.tolist()) for chunk in order.chunk(2)]
    assert len(chunks[0]) == len(chunks[1]) == 4
    assert len({0, 7} & chunks[0]) == len({0, 7} & chunks[1]) == 1


def test_every_mini_batch_is_spread_evenly_over_the_chunks():
    lengths = torch.randint(1, 100, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    order = balanced_order(lengths, parts=4, block_rows=8)
    assert sorted(order.tolist()) == list(range(32))
    for chunk in order.chunk(4):
        assert torch.bincount(chunk // 8).tolist() == [2, 2, 2, 2]


def test_the_width_of_the_model_decides_how_much_attention_costs():
    lengths, width = [64, 2048, 2048, 2048, 1024, 1024, 4096, 2048], (64, 8192)
    for own, other in (width, width[::-1]):
        order = balanced_order(lengths, parts=2, block_rows=8, hidden=own)
        spread = {
            hidden: max(costs) / (sum(costs) / 2)
            for hidden in width
            for costs in [[sum(row_cost(lengths[i], hidden=hidden) for i in part) for part in order.chunk(2)]]
        }
        assert spread[own] < 1.02 and spread[other] > 1.1


class Recorder:
    """A group that keeps what it was sent and answers with it."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []

    def call(self, role: str, method: str, batch: Batch, **options: object) -> Pending[Batch]:
        self.sent.append(batch["id"].tolist())
        return Ready(batch.select("id"))


@pytest.mark.parametrize(("over", "balanced"), [(2, True), (1, False)])
def test_rows_go_out_in_their_order_where_nothing_is_balanced(over, balanced):
    """F05, F03: ``trainer.balance_batch`` decides ``balanced_over``; row i of the answer is row i of the question."""
    lengths = torch.tensor([10, 9, 1, 1, 1, 1, 1, 1])
    batch = Batch({"id": torch.arange(8), "prompt_length": torch.zeros_like(lengths), "response_length": lengths})
    group = Recorder()
    answer = gather(ActorHandle(group, "actor", balanced_over=over).compute_log_prob(batch))
    assert answer["id"].tolist() == list(range(8))
    (sent,) = group.sent
    assert sorted(sent) == list(range(8))
    assert ({0, 1} <= set(sent[:4]) or {0, 1} <= set(sent[4:])) != balanced
    assert (sent == list(range(8))) != balanced


@pytest.mark.parametrize(("rows", "parts", "block"), [(7, 2, 7), (8, 3, 8), (8, 2, 3), (8, 4, 6)])
def test_counts_that_do_not_divide_keep_the_order(rows, parts, block):
    assert balanced_order([1] * rows, parts=parts, block_rows=block) is None


def test_rows_of_a_shared_prompt_stay_together_and_groups_are_balanced():
    lengths, prompts = [9, 8, 3, 3, 3, 3, 9, 8], [2] * 8
    order = shared_order(lengths, prompts, together=2, parts=2, block_rows=8)
    chunks = [chunk.tolist() for chunk in order.chunk(2)]
    assert all(chunk[0] % 2 == 0 and chunk[1] == chunk[0] + 1 for rows in chunks for chunk in (rows[:2], rows[2:]))
    assert sorted(len({0, 6} & set(rows)) for rows in chunks) == [1, 1]


@pytest.mark.parametrize(("rows", "block"), [(6, 6), (7, 8), (8, 3)])
def test_groups_that_do_not_divide_keep_the_order(rows, block):
    assert shared_order([3] * rows, [2] * rows, together=2, parts=2, block_rows=block) is None


def test_a_shared_prompt_costs_once_and_its_pairs_with_every_response_count():
    prompt, responses = 40, (7, 11)
    (cost,) = shared_costs([prompt + r for r in responses], [prompt] * 2, together=2)
    assert cost == row_cost(prompt) + sum(row_cost(r) + 2 * prompt * r for r in responses)


def test_transfer_metrics_add_bytes_take_the_slowest_rank_and_the_ratio_of_totals():
    ranks = [
        {"publish/bytes": 6.0, "publish/bound_bytes": 4.0, "publish/ratio_to_bound": 1.5, "publish/seconds": 1.0},
        {"publish/bytes": 4.0, "publish/bound_bytes": 4.0, "publish/ratio_to_bound": 1.0, "publish/seconds": 3.0},
    ]
    found = combine_ranks(ranks)
    assert found == {
        "publish/bytes": 10.0,
        "publish/bound_bytes": 8.0,
        "publish/ratio_to_bound": 1.25,
        "publish/seconds": 3.0,
    }
