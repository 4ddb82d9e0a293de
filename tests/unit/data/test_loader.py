"""The order of prompts: seeded, resumable anywhere, every validation row once."""

import random

import pytest

from hybridflow.config.data import BUILTIN_TASK, DataConfig
from hybridflow.data.dataset import encode_rows
from hybridflow.data.loader import PromptLoader, validation_batches
from hybridflow.data.sources import PromptRow
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.utils.errors import DataError


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUILTIN_TASK)


def dataset(tokenizer, size, first=0):
    rows = [
        PromptRow(prompt=f"{i}+1=", data_source="x", ground_truth=str(i + 1), where=f"row {i}")
        for i in range(first, first + size)
    ]
    return encode_rows(rows, tokenizer, DataConfig(), "data.train_files")


def drawn(loader, batches):
    got = [loader.next_batch() for _ in range(batches)]
    return [(batch["row_id"].tolist(), batch["group_id"].tolist()) for batch in got]


def test_an_epoch_gives_different_rows_and_leaves_out_less_than_a_batch(tokenizer):
    loader = PromptLoader(dataset(tokenizer, 10), batch_size=3, seed=1)
    assert len(loader) == 3
    rows = [row for batch, _ in drawn(loader, 3) for row in batch]
    assert len(set(rows)) == 9
    assert loader.epoch == 1


def test_the_rows_left_out_are_others_each_epoch(tokenizer):
    loader = PromptLoader(dataset(tokenizer, 10), batch_size=3, seed=1)
    left = [set(range(10)) - {row for batch, _ in drawn(loader, 3) for row in batch} for _ in range(8)]
    assert len({min(rest) for rest in left}) > 1


def test_the_order_depends_on_seed_and_epoch_alone(tokenizer):
    data = dataset(tokenizer, 20)
    first, second = (drawn(PromptLoader(data, batch_size=4, seed=1), 10) for _ in range(2))
    assert first == second
    assert first[:5] != first[5:]
    assert first != drawn(PromptLoader(data, batch_size=4, seed=2), 10)


def test_group_ids_never_repeat(tokenizer):
    loader = PromptLoader(dataset(tokenizer, 5), batch_size=2, seed=1)
    ids = [group for _, groups in drawn(loader, 20) for group in groups]
    assert ids == list(range(40))


def test_without_shuffle_rows_come_in_order(tokenizer, caplog):
    loader = PromptLoader(dataset(tokenizer, 5), batch_size=2, seed=1, shuffle=False)
    assert [rows for rows, _ in drawn(loader, 4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert "the last 1 of 5 prompts never fill a batch" in caplog.text


@pytest.mark.parametrize("case", range(12))
def test_resuming_anywhere_gives_the_uninterrupted_sequence(tokenizer, case):
    draw = random.Random(case)
    data, size = dataset(tokenizer, draw.randint(4, 17)), draw.randint(1, 4)
    seed, shuffle, stop = draw.randint(0, 99), draw.random() < 0.8, draw.randint(0, 25)
    whole = drawn(PromptLoader(data, batch_size=size, seed=seed, shuffle=shuffle), stop + 10)
    first = PromptLoader(data, batch_size=size, seed=seed, shuffle=shuffle)
    head = drawn(first, stop)
    resumed = PromptLoader(data, batch_size=size, seed=seed + 1, shuffle=shuffle)
    resumed.load_state_dict(first.state_dict())
    assert resumed.epoch == first.epoch
    assert head + drawn(resumed, 10) == whole


def test_resuming_with_another_batch_size_goes_on_at_the_same_prompt(tokenizer):
    data = dataset(tokenizer, 12)
    first = PromptLoader(data, batch_size=2, seed=3)
    head = [row for rows, _ in drawn(first, 2) for row in rows]
    resumed = PromptLoader(data, batch_size=4, seed=3)
    resumed.load_state_dict(first.state_dict())
    rest = [row for rows, _ in drawn(resumed, 2) for row in rows]
    assert sorted(head + rest) == list(range(12))
    late = PromptLoader(data, batch_size=10, seed=3)
    late.load_state_dict(first.state_dict())
    assert len(late.next_batch()) == 10


@pytest.mark.parametrize("size", [4, 20])
def test_resuming_with_another_dataset_starts_at_its_beginning(tokenizer, caplog, size):
    first = PromptLoader(dataset(tokenizer, 12), batch_size=2, seed=3)
    drawn(first, 3)
    other = dataset(tokenizer, size, first=40)
    resumed = PromptLoader(other, batch_size=2, seed=3)
    resumed.load_state_dict(first.state_dict())
    assert "another training set" in caplog.text
    rows = [rows for rows, _ in drawn(resumed, 2)]
    assert rows == [rows for rows, _ in drawn(PromptLoader(other, batch_size=2, seed=3), 2)]


def test_a_dataset_smaller_than_a_batch_is_an_error_with_both_sizes(tokenizer):
    with pytest.raises(DataError, match=r"3 prompts .*fewer than one batch of data.train_batch_size=4"):
        PromptLoader(dataset(tokenizer, 3), batch_size=4, seed=1)


@pytest.mark.parametrize("size", [1, 2, 5, 7, None])
def test_validation_gives_every_row_once_in_order(tokenizer, size):
    batches = list(validation_batches(dataset(tokenizer, 5), size))
    assert [row for batch in batches for row in batch["row_id"].tolist()] == [0, 1, 2, 3, 4]
    assert all(len(batch) <= (size or 5) for batch in batches)


def test_validation_of_nothing_gives_no_batch(tokenizer):
    assert list(validation_batches(dataset(tokenizer, 0), None)) == []
