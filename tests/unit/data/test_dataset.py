"""Rows to prompt ids: filter, truncation, columns."""

import json

import pytest
import torch

from hybridflow.batch.columns import TABLE
from hybridflow.config.data import BUILTIN_TASK, DataConfig
from hybridflow.data.dataset import build_datasets, encode_rows
from hybridflow.data.sources import PromptRow
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.utils.errors import DataError
from tests.tiny import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUILTIN_TASK)


def rows_of(*prompts):
    return [
        PromptRow(prompt=prompt, data_source="x", ground_truth=str(i), extra_info={"i": i}, where=f"file row {i}")
        for i, prompt in enumerate(prompts)
    ]


def encode(tokenizer, *prompts, **config):
    return encode_rows(rows_of(*prompts), tokenizer, DataConfig(**config), "data.train_files")


def test_the_default_task_gives_what_the_configuration_says(tokenizer):
    train, val = build_datasets(DataConfig(), tokenizer, seed=1)
    assert (len(train), len(val)) == (2048, 256)
    assert train.longest <= 6
    again, same_val = build_datasets(DataConfig(), tokenizer, seed=2)
    assert train.fingerprint() != again.fingerprint()
    assert val.fingerprint() == same_val.fingerprint()
    assert build_datasets(DataConfig(seed=1), tokenizer, seed=9)[0].fingerprint() == train.fingerprint()


def test_batches_have_the_columns_that_the_table_says_data_writes(tokenizer):
    batch = encode(tokenizer, "1+1=", "22+33=").batch([1, 0], group_ids=[7, 8])
    assert set(batch.names) == {column.name for column in TABLE.values() if column.writer == "data"}
    assert batch["prompt_length"].tolist() == [6, 4]
    assert batch["prompt_ids"].shape == (2, 6)
    assert batch["prompt_ids"].dtype == torch.int64
    assert batch["prompt_ids"][1].tolist() == [*tokenizer.encode_prompt("1+1="), tokenizer.pad_id, tokenizer.pad_id]
    assert batch["group_id"].tolist() == [7, 8]
    assert batch["row_id"].tolist() == [1, 0]
    assert batch.objects("ground_truth") == ("1", "0")
    assert batch.objects("extra_info") == ({"i": 1}, {"i": 0})
    assert batch.objects("raw_prompt") == ("22+33=", "1+1=")


def test_earlier_turns_of_the_assistant_belong_to_the_prompt_and_to_its_group_alone(tmp_path):
    """B19: a prompt user / assistant / user; all its ids are prompt ids, and the same question alone is another group.

    What the policy writes begins behind ``prompt_length``: response_mask covers response_ids only (test_rollout.py).
    """
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    turns = [{"role": r, "content": c} for r, c in (("user", "1+1="), ("assistant", "2"), ("user", "2+2="))]
    batch = encode(tokenizer, turns, turns[-1:]).batch([0, 1], group_ids=[4, 5])
    assert batch["prompt_length"].tolist() == [9, 4]
    assert tokenizer.decode_responses([batch["prompt_ids"][0].tolist()]) == ["1+1=22+2="]
    assert batch["group_id"].tolist() == [4, 5]
    assert "response_ids" not in batch and "response_mask" not in batch


def test_the_filter_drops_and_counts_over_long_prompts_and_keeps_row_ids(tokenizer, caplog):
    dataset = encode(tokenizer, "1+1=", "1" * 9, "2+2=", max_prompt_length=4, filter_overlong_prompts=True)
    assert (len(dataset), dataset.dropped) == (2, 1)
    assert dataset.batch([0, 1], group_ids=[0, 1])["row_id"].tolist() == [0, 2]
    assert "1 of 3 prompts are longer than 4 tokens" in caplog.text


@pytest.mark.parametrize(("mode", "kept"), [("left", "3456"), ("right", "1234"), ("middle", "1256")])
def test_without_the_filter_over_long_prompts_are_cut(tokenizer, mode, kept):
    batch = encode(tokenizer, "123456", max_prompt_length=4, truncation=mode).batch([0], group_ids=[0])
    assert tokenizer.decode_responses(batch["prompt_ids"].tolist()) == [kept]


def test_truncation_error_names_the_row(tokenizer):
    with pytest.raises(DataError, match=r"file row 1: the prompt has 6 tokens"):
        encode(tokenizer, "1+1=", "123456", max_prompt_length=4)


def test_a_prompt_without_tokens_names_the_row(tokenizer):
    with pytest.raises(DataError, match="file row 1: the prompt has no token"):
        encode(tokenizer, "1+1=", "")


def test_nothing_left_after_the_filter_is_an_error_with_counts(tokenizer):
    config = DataConfig(max_prompt_length=2, filter_overlong_prompts=True, generated_size=50)
    with pytest.raises(DataError, match=r"no training prompt is left.*50 rows, 50 of them longer"):
        build_datasets(config, tokenizer, seed=1)


def test_no_validation_files_give_an_empty_validation_set(tokenizer):
    assert len(build_datasets(DataConfig(val_files=()), tokenizer, seed=1)[1]) == 0


def test_other_processes_encode_the_same(tokenizer):
    prompts = [f"{i}+{i}=" for i in range(1500)]
    here = encode(tokenizer, *prompts)
    there = encode(tokenizer, *prompts, filter_overlong_prompts_workers=2)
    assert here.fingerprint() == there.fingerprint()


def test_the_fingerprint_sees_order_truth_and_scorer(tokenizer):
    base = encode(tokenizer, "1+1=", "2+2=").fingerprint()
    assert base == encode(tokenizer, "1+1=", "2+2=").fingerprint()
    assert base != encode(tokenizer, "2+2=", "1+1=").fingerprint()
    other = rows_of("1+1=", "2+2=")[::-1]
    assert base != encode_rows(other, tokenizer, DataConfig(), "x").fingerprint()
