"""Failed samples: counted by cause, limited over all ranks, never a score of 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.rewards.result import RewardError
from hybridflow.trainer.failures import failure_metrics, failures, refuse_too_many
from tests.jobs import read_metrics, run_job

TOLD = (
    *("raised ValueError: x", "raised ValueError: y", "no answer in 3 s"),
    *("its process ended in the call (exit code 1)", "the score nan is not finite", None, None, None),
)
REASONS = ("stop", "stop", "stop", "length", "stop", "abort", "stop", "stop")


def batch() -> Batch:
    """Five rows that could not be scored, one aborted, one empty, one fine."""
    info = [{} if told is None else {"failure": told} for told in TOLD]
    return Batch({"valid": torch.arange(8) == 7, "reward_info": info, "finish_reason": list(REASONS)})


def test_every_cause_has_a_count_and_the_valid_row_none():
    found = failures(batch())
    assert failure_metrics(found) == {
        "failed/ValueError": 2, "failed/late": 1, "failed/died": 1, "failed/not_finite": 1, "failed/aborted": 1,
        "failed/empty": 1,
    }  # fmt: skip


def test_the_limit_counts_all_but_empty_responses_and_tells_the_causes():
    rows = batch()
    refuse_too_many(rows, failures(rows), 6 / 8)
    with pytest.raises(RewardError, match=r"6 of 8 .*max_failed_share=0.7: ValueError 2, .*\n  raised ValueError: x\n"):
        refuse_too_many(rows, failures(rows), 0.7)


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if int(ground_truth) % 2: raise ConnectionError("the judge is down")
    return -1.0
"""


def job(folder: Path, **options: Any) -> list[dict[str, Any]]:
    (folder / "reward.py").write_text(REWARD)
    chosen = {"reward.custom_reward_function.path": str(folder / "reward.py"), **options}
    run_job(folder, **{"trainer.total_training_steps": 1, **chosen})
    return read_metrics(folder)


def test_a_job_with_failing_samples_counts_them_and_scores_none_of_them(tmp_path):
    (step,) = job(tmp_path, **{"reward.max_failed_share": 1.0})
    assert step["failed/ConnectionError"] == step["groups/invalid"] - step.get("failed/empty", 0)
    assert step["critic/score/mean"] == step["critic/score/max"] == -1.0, "a failed sample would be a 0 among them"


def test_a_job_with_too_many_failing_samples_stops_with_the_causes(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)max_failed_share=0.1.*the judge is down"):
        job(tmp_path, **{"reward.max_failed_share": 0.1})
