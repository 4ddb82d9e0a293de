"""Weights published between two steps of a generation, as the control lane asks for it: the workers of one process."""

from __future__ import annotations

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.data.builtin import model_folder
from hybridflow.dispatch.group import RankContext
from hybridflow.engines.train.base import MicroBatching
from hybridflow.roles.protocols import PublishNow
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import EngineError, StateError
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.hybrid import WeightsWorker
from hybridflow.workers.rollout import RolloutWorker, _no_publisher
from tests.jobs import small_config

TOKENS = 12
CUT = 5
TRANSFER = "actor_rollout_ref.rollout.checkpoint_engine"


class Process:
    """One rank that hosts actor, rollout and weights."""

    def __init__(self, config: PPOConfig) -> None:
        self.context = RankContext(rank=0, world=1, local_rank=0, node="here", device="cpu", threads=1)
        folder, dims = str(model_folder(config.actor_rollout_ref.model.path)), ParallelDims()
        self.actor = ActorWorker(
            self.context, config=config, dims=dims, total_steps=None, rollout_tp=1, model_path=folder
        )
        self.context.siblings["actor"] = self.actor
        self.rollout = RolloutWorker(
            self.context, config=config, dims=dims, model_path=folder, eos_token_ids=(), vocab_limit=16
        )
        self.context.siblings["rollout"] = self.rollout
        self.weights = WeightsWorker(self.context, config=config)

    def train(self) -> None:
        """Stands in for an update: every weight moves."""
        generator = torch.Generator().manual_seed(1)
        for shard in self.actor.engine.shards():
            shard.local.add_(0.05 * torch.randn(shard.local.shape, generator=generator))

    def generate(self) -> Batch:
        prompts = Batch(
            {
                "prompt_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]]),
                "prompt_length": torch.tensor([4, 3]),
                "group_id": torch.tensor([0, 1]),
                "row_id": torch.tensor([0, 1]),
                "sample_index": torch.tensor([0, 0]),
            }
        )
        return prompts.merge(self.rollout.generate_sequences(prompts, step=1))

    def log_probs(self, batch: Batch) -> torch.Tensor:
        needs = frozenset({"log_probs"})
        return self.actor.engine.forward(batch, needs, temperature=1.0, micro=MicroBatching(max_rows=8))["log_probs"]


def process(tmp_path, **options) -> Process:
    return Process(
        small_config(
            tmp_path,
            **{"data.max_response_length": TOKENS, "actor_rollout_ref.rollout.ignore_eos": True, **options},
        )
    )


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "abort"])
def test_a_message_publishes_after_the_named_step_and_the_waiting_call_finds_it_done(tmp_path, in_flight):
    here = process(tmp_path, **{f"{TRANSFER}.in_flight": in_flight})
    here.weights.publish(version=0)
    whole = here.generate()
    before = here.log_probs(whole)
    here.train()
    here.context.mailbox.put(PublishNow(version=1, after_steps=CUT))
    mixed = here.generate()
    versions = mixed["weight_version"].tolist()
    assert torch.equal(mixed["response_ids"][:, :CUT], whole["response_ids"][:, :CUT])
    torch.testing.assert_close(mixed["rollout_log_probs"][:, :CUT], before[:, :CUT], atol=1e-5, rtol=0)
    if in_flight == "abort":
        assert versions == [[0] * CUT] * 2
        assert not mixed["valid"].any()
    else:
        assert versions == [[0] * CUT + [1] * (TOKENS - CUT)] * 2
        off = (mixed["rollout_log_probs"] - here.log_probs(mixed))[:, CUT:].abs().max()
        assert (off <= 1e-5) == (in_flight == "recompute")
    told = here.rollout.engine.version
    metrics = here.weights.publish(version=1)  # the call that waited on the work lane
    assert told == 1 and metrics["publish/seconds"] > 0
    assert here.generate()["weight_version"].eq(1).all()  # and a message that is answered is forgotten


def test_a_message_that_no_generation_reads_is_left_to_the_waiting_call(tmp_path):
    here = process(tmp_path)
    here.weights.publish(version=0)
    here.context.mailbox.put(PublishNow(version=1, after_steps=1000))
    assert here.generate()["weight_version"].eq(0).all()
    here.weights.publish(version=1)
    assert here.generate()["weight_version"].eq(1).all()


def test_a_publish_between_steps_that_fails_ends_the_generation_and_the_next_one_succeeds(tmp_path):
    here = process(tmp_path)
    here.weights.publish(version=0)
    shards = here.actor.engine.shards
    here.weights._publisher._engine_shards = lambda: shards()[1:]
    here.context.mailbox.put(PublishNow(version=1, after_steps=CUT))
    with pytest.raises(EngineError, match="missing: the generator needs"):
        here.generate()
    here.weights._publisher._engine_shards = shards
    here.weights.publish(version=2)
    here.rollout.engine.cancel(["0", "1"])
    assert here.generate()["weight_version"].eq(2).all()


def test_without_a_weights_worker_the_message_is_refused(tmp_path):
    here = process(tmp_path)
    here.weights.publish(version=0)
    here.rollout.publish = _no_publisher
    here.context.mailbox.put(PublishNow(version=1))
    with pytest.raises(StateError, match="no weights worker is in this process"):
        here.generate()
