"""``python -m hybridflow.reshard``: the table without weights, the check of a model folder, bad questions."""

from __future__ import annotations

import json
import time

import pytest

from hybridflow.cli.reshard import main
from hybridflow.config.load import load_config
from hybridflow.hybrid_engine.rules import RULES, ShardingRule
from hybridflow.utils.errors import ConfigError
from tests.tiny import save_tiny_model
from tests.unit.models.test_load import stack_experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def run(capsys, *words):
    code = main(list(words))
    return code, capsys.readouterr()


def test_the_table_tells_bytes_per_rank_ratio_and_buffers(capsys):
    code, out = run(capsys, "--model", "qwen2.5-7b", "--train", "dp_shard=8", "--rollout", "tp=2")
    assert code == 0
    assert "train dp_shard=8 (permuted shards" in out.out
    assert out.out.count("5.71 GB") >= 8
    assert "ratio to M (1/t - 1/N) = 5.71 GB: 1.0000 on average" in out.out
    assert "gathering everything: 2.33" in out.out
    assert "buckets: 2 x 67.1 MB" in out.out


def test_thousands_of_ranks_are_summed_in_seconds_and_a_few_shown(capsys):
    started = time.process_time()
    code, out = run(
        capsys, "--model", "qwen2.5-0.5b", "--train", "dp_shard=2048", "--rollout", "tp=2", "--ranks-per-node", "8"
    )
    assert code == 0
    assert len([line for line in out.out.splitlines() if line.strip()[:1].isdigit()]) == 5
    assert time.process_time() - started < 20  # about 3 s


def test_a_folder_without_weights_is_enough(capsys, tmp_path, folder):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out = run(
        capsys, "--model", str(tmp_path), "--train", "dp_replicate=2,dp_shard=2", "--rollout", "tp=2", "--explain", "1"
    )
    assert code == 0
    assert "rank 1 of 4: receives" in out.out


def test_a_trainer_with_tensor_parallelism_keeps_the_plain_order(capsys):
    code, out = run(capsys, "--model", "qwen2.5-7b", "--train", "dp_shard=4", "tp=2", "--rollout", "tp=2")
    assert code == 0
    assert "shards in order of rank" in out.out
    assert "1.0000 on average" in out.out


def test_check_rehearses_with_the_models_own_weights(capsys, folder):
    code, out = run(capsys, "check", "--model", str(folder), "--tp", "2")
    assert code == 0
    assert out.out.count("its own weights: bit for bit") == 3
    assert "key_value in qkv_proj" in out.out


@pytest.mark.parametrize("stacked", [False, True])
def test_check_rehearses_experts_with_the_models_own_weights(capsys, tmp_path, stacked):
    folder = save_tiny_model(tmp_path / "model", family="qwen3_moe")
    if stacked:
        stack_experts(folder)
    code, out = run(capsys, "check", "--model", str(folder), "--tp", "2")
    assert code == 0
    assert out.out.count("its own weights: bit for bit") == 3
    assert "2 x stacked_in" in out.out and "2 x stacked_out" in out.out


def test_pipeline_parallel_generation_is_refused_with_what_to_use_instead():
    with pytest.raises(ConfigError, match="rollout.pipeline_model_parallel_size.*use tensor_model_parallel_size"):
        load_config({"actor_rollout_ref": {"rollout": {"pipeline_model_parallel_size": 2}}})


SINKS = (*RULES["Qwen2ForCausalLM"], ShardingRule(pattern=r".*\.sinks", cut="query"))
"""A user's own list, as the guide writes it."""


def test_check_takes_the_users_own_rules(capsys, tmp_path, monkeypatch):
    monkeypatch.delitem(RULES, "LlamaForCausalLM")
    folder = save_tiny_model(tmp_path / "model", family="llama")
    code, out = run(capsys, "check", "--model", str(folder), "--tp", "2")
    assert code == 2 and "no sharding rules for the architecture 'LlamaForCausalLM'" in out.err
    code, out = run(capsys, "check", "--model", str(folder), "--tp", "2", "--rules", f"{__name__}:SINKS")
    assert code == 0 and out.out.count("bit for bit") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "no-such", "--train", "dp_shard=2", "--rollout", "tp=1"], "neither a folder nor a config file"),
        (["--model", "qwen2.5-7b", "--train", "shards=2", "--rollout", "tp=1"], "--train 'shards=2': write AXIS=N"),
        (
            ["--model", "qwen2.5-7b", "--train", "dp_shard=8", "--rollout", "tp=2", "pp=2"],
            "--rollout 'pp=2': write AXIS=N with an axis of tp",
        ),
        (["--model", "qwen2.5-7b", "--train", "dp_shard=6", "--rollout", "tp=4"], "tp=4 does not divide the 6 ranks"),
        (["--model", "qwen2.5-7b", "--train", "dp_shard=8", "--rollout", "tp=8"], "28 query heads over tp=8"),
        (
            ["--model", "qwen2.5-7b", "--train", "dp_shard=2", "tp=2", "--rollout", "tp=2", "--order", "permuted"],
            "--order permuted is for trainers with data parallelism alone, not tp=2",
        ),
    ],
)
def test_wrong_questions_get_one_line_and_exit_2(capsys, words, message):
    code, out = run(capsys, *words)
    assert code == 2
    assert message in out.err
