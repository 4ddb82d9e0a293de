"""The embedded task: a fixed deal of questions, a model that transformers loads, and what it knows at the start."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.config.data import BUILTIN_TASK
from hybridflow.data.builtin import arithmetic_rows, ensure_builtin_model, model_folder
from hybridflow.data.builtin_spec import MODEL_CONFIG, VOCABULARY, answer_text, pairs, prompt_text
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.utils.errors import DataError


def test_every_pair_is_dealt_once():
    dealt = [*pairs("train"), *pairs("held_out")]
    assert len(dealt) == len(set(dealt)) == 10_000


def test_the_deal_is_the_one_the_shipped_weights_were_trained_on():
    assert pairs("held_out")[:3] == ((34, 15), (32, 82), (50, 66))


def test_training_rows_follow_the_seed_and_held_out_rows_do_not():
    def prompts(seed, held_out):
        return [row["prompt"] for row in arithmetic_rows(100, seed=seed, held_out=held_out)]

    assert prompts(1, False) == prompts(1, False) != prompts(2, False)
    assert prompts(1, True) == prompts(2, True)
    assert not set(prompts(1, False)) & set(prompts(1, True))


def test_more_questions_than_there_are_is_an_error_that_names_the_key():
    with pytest.raises(DataError, match=r"generated_val_size=1001.*1000 different"):
        arithmetic_rows(1001, seed=0, held_out=True)


def test_the_spec_can_be_read_without_torch():
    code = "import sys, hybridflow.data.builtin_spec, hybridflow.data.builtin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_shipped_folder_agrees_with_the_spec_and_is_small(tmp_path):
    folder = ensure_builtin_model(tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in MODEL_CONFIG} == MODEL_CONFIG
    assert config["dtype"] == "float32"
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] == VOCABULARY
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1.5e6


def test_model_folder_leaves_other_paths_alone():
    assert model_folder("Qwen/Qwen2-7B") == "Qwen/Qwen2-7B"
    assert model_folder(BUILTIN_TASK) == str(ensure_builtin_model())


def test_the_warm_start_knows_the_task_badly():
    """Sampled well below greedy and both below perfect, so that training has something to show."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(BUILTIN_TASK))
    tokenizer = load_tokenizer(BUILTIN_TASK)
    questions = [pair for pair in pairs("held_out")[:400] if len(prompt_text(pair)) == 6]
    ids = torch.tensor(tokenizer.encode_text([prompt_text(pair) for pair in questions]))

    def accuracy(greedy):
        torch.manual_seed(0)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=not greedy, top_k=0, max_new_tokens=4, pad_token_id=0
        )
        texts = tokenizer.decode_responses(out[:, 6:].tolist())
        return sum(text == answer_text(pair) for text, pair in zip(texts, questions, strict=True)) / len(questions)

    assert 0.15 < accuracy(greedy=False) < 0.35
    assert 0.4 < accuracy(greedy=True) < 0.7
