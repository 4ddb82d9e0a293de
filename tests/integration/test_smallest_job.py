"""A job at the lower end of everything that may be asked for, in a folder whose name needs care."""

from __future__ import annotations

import json
from typing import Any

from hybridflow.trainer.checkpoint import CheckpointStore
from tests.jobs import read_metrics, run_job

ROW = {"prompt": "1+1=", "data_source": "hybridflow/arithmetic", "reward_model": {"ground_truth": "2"}}
SMALLEST: dict[str, Any] = {
    "data.train_batch_size": 1,
    "data.max_response_length": 1,
    "data.generated_val_size": 1,
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "critic.ppo_mini_batch_size": 1,
    "trainer.val_before_train": True,
    "trainer.total_training_steps": 1,
    "trainer.save_freq": 100,
}


def test_one_prompt_one_sample_one_token_and_one_step_make_a_run_that_goes_on(tmp_path, capfd):
    """And one held-out prompt; the cadence of saves is beyond the end: the last step is saved all the same."""
    folder = tmp_path / "größer als 100% & #1 (neu)"
    (tmp_path / "one row.jsonl").write_text(json.dumps(ROW) + "\n")
    options = SMALLEST | {"data.train_files": [str(tmp_path / "one row.jsonl")]}
    first = run_job(folder, **options)
    assert [row["step"] for row in first] == [0, 1]
    assert first[1]["response_length/max"] == 1
    newest = CheckpointStore(folder).newest()
    assert newest is not None and newest.step == 1
    assert f"hybridflow.report '{folder}'" in capfd.readouterr().out, "the command that is proposed can be pasted"
    assert run_job(folder, **options) == first, "behind the last step there is nothing to do"
    assert "is of step 1 and the run has 1: no step is left to do" in capfd.readouterr().err
    run_job(folder, **options | {"trainer.total_training_steps": 3})
    assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2, 3]
