"""The control lane brings new weights under a generation that runs: real processes, an engine in each of two."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import gather
from hybridflow.launch.build import _model_source, _weights
from hybridflow.launch.groups import open_groups
from hybridflow.launch.preflight import plan_run
from hybridflow.launch.specs import worker_specs
from hybridflow.roles.handles import RolloutHandle
from tests.jobs import small_config

TOKENS = 100


@pytest.mark.parametrize(
    "place",
    [
        {"trainer.n_gpus_per_node": 2},
        {"trainer.pools": {"sampling": {"slots": [2], "roles": ["rollout"]}}},
    ],
    ids=["with the actor", "in a pool of its own"],
)
def test_a_running_generation_gets_new_weights_on_every_rank_and_the_call_returns_their_metrics(
    tmp_path, place: dict[str, Any]
):
    config = small_config(
        tmp_path,
        **{
            **place,
            "trainer.threads_per_worker": 1,
            "data.max_response_length": TOKENS,
            "actor_rollout_ref.rollout.ignore_eos": True,
            "actor_rollout_ref.rollout.checkpoint_engine.verify": "always",
        },
    )
    plan = plan_run(config)
    prompts = Batch(
        {
            "prompt_ids": torch.tensor([[3, 4, 5, 6]] * 4),
            "prompt_length": torch.tensor([4, 3, 4, 2]),
            "group_id": torch.arange(4),
            "row_id": torch.arange(4),
            "sample_index": torch.zeros(4, dtype=torch.long),
        }
    )
    with ExitStack() as stack:
        source, _ = _model_source(config)
        groups = open_groups(config, plan, worker_specs(config, plan, source, 1), stack)
        for group in groups.values():
            group.wait_ready()
        rollout, weights = RolloutHandle(groups[config.pool_of("rollout")], "rollout"), _weights(config, groups)
        gather(weights.publish(version=0))
        running = rollout.generate_sequences(prompts, step=1)
        moved = weights.publish(version=1, between_steps=True)
        versions = gather(running).fetched()["weight_version"]
        metrics = gather(moved)
        after = gather(rollout.generate_sequences(prompts, step=2)).fetched()["weight_version"]
    assert versions.shape == (4, TOKENS)
    assert torch.equal(versions, versions.sort(dim=1).values)
    assert versions[:, 0].eq(0).all() and versions[:, -1].eq(1).all()
    assert metrics["publish/ratio_to_bound"] == 1.0 and metrics["publish/bytes"] > 0
    assert after.eq(1).all()
