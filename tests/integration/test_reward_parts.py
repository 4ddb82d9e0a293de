"""Weighted components, and rewards of parts of a response, from the reward function to what is learned from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.config.problems import InvalidConfigError
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.dispatch.group import RankContext
from hybridflow.rewards.result import RewardError
from hybridflow.workers.reward import RewardWorker
from tests.jobs import run_job, small_config

HERE = Path(__file__).parent
COMPONENTS = {"reward.custom_reward_function.path": str(HERE / "reward_of_two_components.py")}
STEPS = {"reward.custom_reward_function.path": str(HERE / "reward_by_step.py"), "reward.step_rewards": True}
WEIGHTS = {"exact": 2.0, "short": -0.25, "function": 0.5}


def samples(folder: Path, step: int = 1) -> list[dict]:
    return [json.loads(line) for line in (folder / f"step_{step}.jsonl").read_text().splitlines()]


def test_the_weighted_sum_is_trained_on_and_validated_and_its_parts_are_logged_apart(tmp_path):
    """H10, H11."""
    options = {**COMPONENTS, "reward.component_weights": WEIGHTS, "trainer.rollout_data_dir": str(tmp_path / "out")}
    first, last = run_job(tmp_path, **options)
    rows = [row for row in samples(tmp_path / "out") if row["valid"]]
    for row in rows:
        info = row["reward_info"]
        assert row["score"] == pytest.approx(2.0 * info["exact"] - 0.25 * info["short"] + 0.5 * info["function"])
        assert info["function"] == info["exact"] + 0.5 * info["short"]
    assert first["critic/score/mean"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
    for name in WEIGHTS:
        mean = sum(row["reward_info"][name] for row in rows) / len(rows)
        assert first[f"reward/{name}/mean"] == pytest.approx(mean)
    (scored,) = (value for name, value in last.items() if name.endswith("/reward/mean_at_1"))
    parts = {name: next(v for k, v in last.items() if f"/{name}/" in k and k.startswith("val-aux")) for name in WEIGHTS}
    assert scored == pytest.approx(sum(weight * parts[name] for name, weight in WEIGHTS.items()))


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_step_rewards_reach_credit_assignment(tmp_path, estimator):
    out = tmp_path / "out"
    first, _ = run_job(
        tmp_path, **STEPS, **{"algorithm.adv_estimator": estimator, "trainer.rollout_data_dir": str(out)}
    )
    rows = [row for row in samples(out) if row["valid"]]
    paid = [row["score"] + 0.1 * row["reward_info"]["digits"] for row in rows]
    assert any(row["reward_info"]["digits"] for row in rows)
    assert first["critic/score/mean"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
    assert first["critic/rewards/mean"] == pytest.approx(sum(paid) / len(paid), rel=1e-5)


def scorer(folder: Path, **options: object) -> RewardWorker:
    config = small_config(folder, **{**STEPS, **options})
    return RewardWorker(
        RankContext(rank=0, world=1, local_rank=0, node="here", device="cpu", threads=1),
        config=config,
        tokenizer_path="builtin:arithmetic",
    )


def response(text: str, width: int) -> tuple[list[int], int]:
    ids = load_tokenizer("builtin:arithmetic").hf(text, add_special_tokens=False)["input_ids"]
    return ids + [0] * (width - len(ids)), len(ids)


def batch(*texts: str) -> Batch:
    rows = [response(text, 8) for text in texts]
    columns = {"data_source": ["x"] * len(rows), "ground_truth": ["7"] * len(rows), "extra_info": [{}] * len(rows)}
    lengths = torch.tensor([length for _, length in rows])
    ids = torch.tensor([ids for ids, _ in rows])
    return Batch({"response_ids": ids, "response_length": lengths, "valid": lengths > 0, **columns})


def test_a_step_is_paid_at_the_token_that_ends_it(tmp_path):
    """The embedded task's tokens are characters, so the token of a digit is the digit."""
    found = scorer(tmp_path).compute_reward(batch("1+2", "7", "++"))
    expected = torch.zeros(3, 8)
    expected[0, [0, 2]] = expected[1, 0] = 0.1
    torch.testing.assert_close(found["token_scores"], expected)
    assert found["score"].tolist() == [0.0, 1.0, 0.0]


def test_places_beyond_both_ends_are_the_first_and_the_last_token(tmp_path):
    worker, (ids, length) = scorer(tmp_path), response("12+34", 5)
    assert [worker._token_that_ends(ids[:length], place) for place in (-3, 0, 1, 2, 5, 6, 99)] == [0, 0, 0, 1, 4, 4, 4]


def test_step_rewards_that_nobody_asked_for_are_an_error(tmp_path):
    with pytest.raises(RewardError, match="set reward.step_rewards=True"):
        scorer(tmp_path, **{"reward.step_rewards": False}).compute_reward(batch("1"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reward.component_weights": {"reward_model": 1.0}}, "and there is none"),
        ({"reward.component_weights": {"exact": float("inf")}}, "must be a number"),
        ({**STEPS, "algorithm.adv_estimator": "remax"}, "greedy baseline"),
        (
            {
                "reward.reward_model.enable": True,
                "reward.reward_model.model.path": "m",
                "reward.component_weights": {"function": 1.0},
                **COMPONENTS,
            },
            "reward.component_weights.reward_model=1.0",
        ),
    ],
)
def test_weights_and_steps_that_would_do_nothing_are_refused(tmp_path, options, words):
    with pytest.raises(InvalidConfigError, match=words):
        small_config(tmp_path, **options)
