"""The control lane brings new weights under a generation that runs: two real processes, an engine in each."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import gather
from hybridflow.launch.build import _model_source
from hybridflow.launch.groups import open_groups
from hybridflow.launch.preflight import plan_run
from hybridflow.launch.specs import worker_specs
from hybridflow.roles.handles import RolloutHandle, WeightsHandle
from hybridflow.topology.resources import MAIN_POOL
from tests.jobs import small_config

TOKENS = 100


def test_a_running_generation_gets_new_weights_on_every_rank_and_the_call_returns_their_metrics(tmp_path):
    config = small_config(
        tmp_path,
        **{
            "trainer.n_gpus_per_node": 2,
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
        group = open_groups(config, plan, worker_specs(config, plan, source, 1), stack)[MAIN_POOL]
        group.wait_ready()
        rollout, weights = RolloutHandle(group, "rollout"), WeightsHandle(group, "weights")
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
