"""examples/own_task: prompts of the user's own reader, scores and metrics of their own function."""

from __future__ import annotations

from pathlib import Path

from hybridflow.trainer.metric_table import describe
from tests.jobs import run_job

TASK = str(Path(__file__).parents[2] / "examples/own_task/task.py")


def test_a_reader_and_a_reward_function_in_one_file_make_a_task(tmp_path):
    steps = run_job(
        tmp_path,
        **{
            "data.custom_cls.path": TASK,
            "data.custom_cls.name": "read_prompts",
            "data.train_files": "20",
            "data.val_files": "20",
            "reward.custom_reward_function.path": TASK,
            "trainer.val_before_train": True,
        },
    )
    parts = {"reward/right_length/mean", "val-aux/own/sums/reward/right_length/mean_at_1"}
    assert all(0 < step["reward/right_length/mean"] <= 1 for step in steps if step["step"] > 0)
    assert parts <= {name for step in steps for name in step}
    assert [name for step in steps for name in step if describe(name) is None] == []
    assert "val-core/own/sums/greedy/mean_at_1" in steps[0]
