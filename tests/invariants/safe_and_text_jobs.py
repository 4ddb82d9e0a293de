"""Runs a job with costs (Safe-RLHF) and text (PPO-ptx) at one layout and leaves its metrics: arguments LAYOUT FOLDER.

A program of its own: the ranks of a local group are processes of a fork server, which needs a guarded main module.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.jobs import run_job

USER = Path(__file__).parents[1] / "integration"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"trainer.n_gpus_per_node": 1},
    "dp2": {"trainer.n_gpus_per_node": 2},
    "pp2": {
        "trainer.n_gpus_per_node": 2,
        "actor_rollout_ref.actor.pipeline_parallel_size": 2,
        "critic.pipeline_parallel_size": 2,
    },
}
JOB: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.safe_rlhf.enable": True,
    "reward.custom_reward_function.path": str(USER / "reward_with_cost.py"),
    "algorithm.ptx_coef": 0.5,
    "algorithm.ptx_files": [str(USER / "text.txt")],
    "algorithm.ptx_length": 9,
    "algorithm.ptx_batch_size": 5,
    "trainer.threads_per_worker": 1,
}

if __name__ == "__main__":
    run_job(Path(sys.argv[2]), **JOB, **LAYOUTS[sys.argv[1]])
