"""A trained reward model as a role of the main job, against transformers' own sequence classifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.data.builtin import model_folder
from hybridflow.utils.errors import ConfigError, WorkerError
from tests.jobs import read_metrics, run_job
from tests.tiny import save_tiny_model


def reward_model(folder: Path, *, labels: int = 1) -> Path:
    """A random sequence classifier over the embedded task's tokens."""
    torch.manual_seed(3)
    source = model_folder("builtin:arithmetic")
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=labels, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def options(folder: Path, **more: object) -> dict[str, object]:
    chosen = {"enable": True, "model.path": str(folder), **more}
    return {f"reward.reward_model.{name}": value for name, value in chosen.items()}


def rollouts(folder: Path, step: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return reward_model(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def alone(judge, tmp_path_factory):
    """A run on one rank and its samples."""
    folder = tmp_path_factory.mktemp("alone")
    run_job(folder, **options(judge), **{"trainer.rollout_data_dir": str(folder / "samples")})
    return folder


def test_scores_are_those_of_the_sequence_classifier_at_the_last_token(judge, alone):
    classifier = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    seen = 0
    for row in rollouts(alone / "samples", 1):
        if row["finish_reason"] != "stop":
            continue
        # The jsonl holds texts; the end token that stopped a response was its last token.
        ids = tokenizer(row["prompt"] + row["response"], add_special_tokens=False)["input_ids"] + [
            tokenizer.eos_token_id
        ]
        with torch.no_grad():
            want = classifier(torch.tensor([ids])).logits[0, 0]
        assert row["score"] == pytest.approx(float(want), abs=1e-5)
        seen += 1
    assert seen > 5


def test_its_score_is_a_metric_by_itself_and_it_is_timed(alone):
    for line in read_metrics(alone):
        assert line["reward/reward_model/mean"] == pytest.approx(line["critic/score/mean"])
        assert 0 < line["perf/mfu/reward_model"] < 1


def test_a_function_beside_it_is_added(judge, alone, tmp_path):
    function = tmp_path / "reward.py"
    function.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 10.0\n")
    own = {"reward.custom_reward_function.path": str(function), "trainer.total_training_steps": 1}
    [line] = run_job(tmp_path / "run", **options(judge), **own)
    assert line["critic/score/mean"] == pytest.approx(read_metrics(alone)[0]["critic/score/mean"] + 10)
    assert line["reward/reward_model/mean"] == pytest.approx(read_metrics(alone)[0]["reward/reward_model/mean"])


@pytest.mark.parametrize(
    "layout",
    [
        {"reward.reward_model.tensor_parallel_size": 2},
        {
            "reward.reward_model.pipeline_parallel_size": 2,
            "trainer.pools": {"judges": {"slots": [2], "roles": ["reward"]}},
        },
    ],
    ids=["tp2", "pp2 in a pool of its own"],
)
def test_its_layout_and_pool_change_nothing(judge, alone, tmp_path, layout):
    world = 1 if "trainer.pools" in layout else 2
    run_job(tmp_path, **options(judge), **layout, **{"trainer.n_gpus_per_node": world})
    for line, want in zip(read_metrics(tmp_path), read_metrics(alone), strict=True):
        for name in ("critic/score/mean", "reward/reward_model/mean", "actor/loss"):
            assert line[name] == pytest.approx(want[name], abs=1e-4)


def test_a_model_without_a_head_or_with_other_tokens_is_refused(tmp_path):
    with pytest.raises(WorkerError, match="no weights for score.weight"):
        run_job(tmp_path / "a", **options(Path(model_folder("builtin:arithmetic"))))
    damaged = reward_model(tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="no tokenizer can be loaded from .*damaged"):
        run_job(tmp_path / "c", **options(damaged))
    foreign = save_tiny_model(tmp_path / "foreign")
    with pytest.raises(ConfigError, match="its tokens are not those"):
        run_job(tmp_path / "b", **options(foreign))
