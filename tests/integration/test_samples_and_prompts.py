"""What reaches the generator in the main job: how many requests, of which tokens, and how long they run."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from hybridflow.config.data import BUILTIN_TASK
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engines.rollout.base import Request
from hybridflow.workers.rollout import RolloutWorker
from tests.jobs import run_job

PROMPTS, SAMPLES = 4, 3
SIZES = {
    "data.train_batch_size": PROMPTS,
    "actor_rollout_ref.rollout.n": SAMPLES,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "trainer.total_training_steps": 1,
}


@pytest.fixture
def requests(monkeypatch) -> list[tuple[str, list[Request]]]:
    """(mode, requests) of every call of the generator's worker."""
    seen: list[tuple[str, list[Request]]] = []
    make = RolloutWorker._requests

    def watching(worker, prompts, step, mode):
        made = make(worker, prompts, step, mode)
        seen.append((mode, made))
        return made

    monkeypatch.setattr(RolloutWorker, "_requests", watching)
    return seen


def test_a_step_asks_for_n_samples_and_one_greedy_response_per_prompt_with_its_very_tokens(tmp_path, requests):
    """B16, B17, E06: neither trainer nor generator multiplies twice, and no pad id is a prompt token."""
    questions = tmp_path / "questions.jsonl"
    rows = [{"data_source": "hybridflow/arithmetic", "prompt": f"{7**i}+1=", "ground_truth": "2"} for i in range(6)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "data.train_files": [str(questions)],
        "data.max_prompt_length": 8,
        "trainer.rollout_data_dir": str(tmp_path / "samples"),
        "algorithm.adv_estimator": "remax",
    }
    run_job(tmp_path / "run", **SIZES, **options)
    lines = [json.loads(line) for line in (tmp_path / "samples" / "step_1.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(BUILTIN_TASK)
    expected = [tokenizer.encode_prompt(line["prompt"]) for line in lines]
    assert len({len(ids) for ids in expected}) > 1, "prompts of one length would hide padding"
    assert sorted(Counter(line["group_id"] for line in lines).values()) == [SAMPLES] * PROMPTS
    calls, modes = dict(requests[:2]), [mode for mode, _ in requests]
    assert modes[:2] == ["train", "greedy"] and "train" not in modes[2:]  # what follows is the validation of the end
    assert [list(request.prompt_ids) for request in calls["train"]] == expected
    assert [list(request.prompt_ids) for request in calls["greedy"]] == expected[::SAMPLES]
    assert {request.sampling.temperature for request in calls["greedy"]} == {0.0}
    assert len({request.seed for request in calls["train"]}) == PROMPTS * SAMPLES


def test_without_end_ids_every_response_has_the_full_length_and_all_of_it_is_trained(tmp_path, requests):
    """E04: with ignore_eos an end id is a token like any other, before and behind it. J08: what was processed is
    counted in tokens of all rows, prompts included."""
    limit = {"data.max_response_length": 6, "actor_rollout_ref.rollout.ignore_eos": True}
    (step,) = run_job(tmp_path, **{**SIZES, **limit})
    assert step["response_length/min"] == step["response_length/max"] == 6
    assert step["batch/trained_tokens"] == PROMPTS * SAMPLES * 6
    assert step["perf/total_num_tokens"] == pytest.approx(PROMPTS * SAMPLES * (6 + step["prompt_length/mean"]))
    assert all(request.sampling.ignore_eos for _, made in requests for request in made)


def test_one_seed_is_one_run_and_another_seed_another(tmp_path):
    """D08: prompts, responses and updates follow from trainer.seed alone."""
    steps, samples = {}, {}
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        folder = {"trainer.rollout_data_dir": str(tmp_path / f"{name}_samples")}
        lines = run_job(tmp_path / name, **{**SIZES, **folder, "trainer.seed": seed, "trainer.total_training_steps": 2})
        clocks = ("timing_s/", "perf/", "residency/", "publish/")
        steps[name] = [{key: value for key, value in line.items() if not key.startswith(clocks)} for line in lines]
        samples[name] = (tmp_path / f"{name}_samples" / "step_2.jsonl").read_text()
    assert steps["one"] == steps["again"] and samples["one"] == samples["again"]
    assert samples["one"] != samples["other"]
    assert [step["actor/grad_norm"] for step in steps["one"]] != [step["actor/grad_norm"] for step in steps["other"]]


def test_validation_before_and_between_steps_changes_nothing_that_is_trained_on(tmp_path):
    """Its requests have seeds of their own, and it leaves no state in the generator, the streams or the data."""
    lines = []
    for name, validates in (("with", True), ("without", False)):
        often = {"trainer.val_before_train": validates, "trainer.test_freq": 1 if validates else -1}
        folder = {"trainer.rollout_data_dir": str(tmp_path / f"{name}_samples")}
        job = run_job(tmp_path / name, **{**SIZES, **often, **folder, "trainer.total_training_steps": 3})
        lines.append([[line["actor/grad_norm"], line["critic/score/mean"]] for line in job if line["step"]])
    assert lines[0] == lines[1] and len(lines[0]) == 3
    texts = [(tmp_path / f"{name}_samples" / "step_3.jsonl").read_text() for name in ("with", "without")]
    assert texts[0] == texts[1]
