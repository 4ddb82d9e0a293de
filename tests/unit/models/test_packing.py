"""Packing: the layout by hand, the way back, and what must be refused."""

from __future__ import annotations

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.models.packing import ALONE, pack, prompt_groups, row_tokens
from hybridflow.utils.errors import ColumnError


def rows(prompts: list[list[int]], responses: list[list[int]], width: int = 4) -> Batch:
    def padded(lists: list[list[int]], wide: int) -> torch.Tensor:
        return torch.tensor([ids + [99] * (wide - len(ids)) for ids in lists])

    return Batch(
        {
            "prompt_ids": padded(prompts, max(map(len, prompts))),
            "prompt_length": torch.tensor([len(ids) for ids in prompts]),
            "response_ids": padded(responses, width),
            "response_length": torch.tensor([len(ids) for ids in responses]),
        }
    )


def test_the_layout_of_two_rows() -> None:
    packed = pack(rows([[1, 2], [3]], [[4, 5], [6, 7, 8, 9]]))
    assert packed.lengths == (4, 3)
    assert packed.input_ids.tolist() == [[3, 6, 7, 8, 1, 2, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert packed.select.tolist() == [0, 1, 2, 3, 5, 6]
    assert packed.targets.tolist() == [6, 7, 8, 9, 4, 5]


def test_unpack_puts_every_token_back_into_its_row() -> None:
    packed = pack(rows([[1, 2], [3]], [[4, 5], [6, 7, 8, 9]]))
    assert packed.unpack(packed.targets.float()).tolist() == [[4, 5, 0, 0], [6, 7, 8, 9]]


def test_padding_tokens_never_enter_the_packed_row() -> None:
    packed = pack(rows([[1, 2, 3], [4]], [[5], [6, 7]]))
    assert 99 not in packed.input_ids.tolist()[0]
    assert packed.tokens == int(row_tokens(rows([[1, 2, 3], [4]], [[5], [6, 7]])).sum())


def test_a_row_without_response_brings_no_token() -> None:
    packed = pack(rows([[1, 2], [3, 4, 5]], [[], [6]]))
    assert packed.lengths == (3,)
    assert packed.row.tolist() == [1]


def test_rows_without_any_response_are_represented_by_a_stand_in() -> None:
    packed = pack(rows([[1, 2]], [[]]))
    assert packed.stands_in
    values = torch.ones(1, requires_grad=True)
    padded = packed.unpack(values)
    assert padded.tolist() == [[0, 0, 0, 0]]
    padded.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0]


def test_no_rows_at_all_are_represented_by_a_stand_in() -> None:
    assert pack(rows([[1, 2]], [[3]]).rows([])).stands_in


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ColumnError, match="row 1 has an empty prompt"):
        pack(rows([[1], []], [[2], [3]]))


def test_a_length_beyond_its_column_is_refused() -> None:
    batch = rows([[1]], [[2]]).with_columns(response_length=torch.tensor([9]))
    with pytest.raises(ColumnError, match="response_length goes up to 9, but response_ids is 4 wide"):
        pack(batch)


def test_the_layout_of_two_rows_behind_one_prompt_and_a_third() -> None:
    batch = rows([[1, 2], [3], [1, 2]], [[4, 5], [6, 7, 8, 9], [7, 8, 9]])
    groups = prompt_groups(batch)
    assert groups == [0, 1, 0]
    packed = pack(batch, groups)
    assert packed.lengths == (4, 2, 2, 1) and packed.prefixes == (ALONE, ALONE, 1, 1) and packed.seen == (0, 0, 2, 2)
    assert packed.input_ids.tolist() == [[3, 6, 7, 8, 1, 2, 7, 8, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 2]]
    assert packed.unpack(packed.targets.float()).tolist() == [[4, 5, 0, 0], [6, 7, 8, 9], [7, 8, 9, 0]]
    before = packed.input_ids[0, packed.select].float()
    assert packed.unpack(before).tolist() == [[2, 4, 0, 0], [3, 6, 7, 8], [2, 7, 8, 0]]


def test_responses_of_one_token_need_nothing_but_the_shared_prompt() -> None:
    batch = rows([[1, 2], [1, 2]], [[4], [5]])
    packed = pack(batch, prompt_groups(batch))
    assert packed.lengths == (2,)
    assert packed.select.tolist() == [1, 1] and packed.targets.tolist() == [4, 5]


def test_prompts_are_equal_by_their_tokens_and_length_and_not_by_their_padding() -> None:
    assert prompt_groups(rows([[1, 2], [1, 2, 99], [1, 2], [1], [1]], [[4]] * 5)) == [0, 1, 0, 3, 4]


def test_a_group_of_which_one_row_has_a_response_is_a_whole_row() -> None:
    batch = rows([[1, 2], [1, 2]], [[4, 5], []])
    packed, plain = pack(batch, prompt_groups(batch)), pack(batch)
    assert packed.lengths == plain.lengths == (3,) and packed.prefixes == plain.prefixes == (ALONE,)
