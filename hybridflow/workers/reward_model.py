"""The trained reward model: a value head read once, behind the last token of a response."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.engines.train.base import TrainEngine
from hybridflow.engines.train.registry import TRAIN_ENGINES
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.optional import load
from hybridflow.workers.actor import SEQUENCE
from hybridflow.workers.costs import work_metrics
from hybridflow.workers.minibatch import micro_batching
from hybridflow.workers.out_of_memory import explained
from hybridflow.workers.residence import resident


class RewardModelWorker:
    """One rank of the reward model; arguments as the actor's. ``model_path``: a folder that has the head."""

    def __init__(self, context: RankContext, *, config: PPOConfig, dims: ParallelDims, model_path: str) -> None:
        model = config.reward.reward_model
        self._config = config
        self._sharding = model.sharding
        self._micro = micro_batching(
            dynamic=None, tokens_per_device=model.max_token_len_per_gpu, rows=model.micro_batch_size_per_gpu, sp=dims.sp
        )
        self._engine: TrainEngine = load(TRAIN_ENGINES["fsdp2"])(
            model=replace(model.model, path=model_path),
            head="value",
            sharding=self._sharding,
            dims=dims,
            optim=None,
            grad_clip=0.0,
            device=context.device,
            total_steps=None,
            seed=config.trainer.seed,
        )
        self._work: Mapping[str, float] = {}

    @register(dispatch="MESH_3D", reads=SEQUENCE, writes=("model_score",))
    def compute_model_score(self, batch: Batch) -> Batch:
        """model_score ``[b]`` float64: the head's output at each response's last token (an end token counts)."""
        start = time.perf_counter()
        with resident(self._engine, self._sharding), explained("compute_model_score", self._config):
            rows = one_longer(batch)
            found = self._engine.forward(rows, frozenset({"values"}), temperature=1.0, micro=self._micro)
        self._work = work_metrics(self._engine, time.perf_counter() - start, "reward_model")
        last = batch["response_length"][:, None]
        return Batch({"model_score": found["values"].gather(1, last)[:, 0].double()})

    def take_work(self) -> Mapping[str, float]:
        """Metrics of the last forward."""
        work, self._work = self._work, {}
        return work

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes of parameters on this rank."""
        return self._engine.held_bytes()


def one_longer(batch: Batch) -> Batch:
    """The rows with one more response token each, whatever it is.

    The engine gives the value in front of each response token. In front of the one more is the state behind the last,
    which later tokens cannot change.
    """
    lengths = batch["response_length"] + 1
    ids = torch.nn.functional.pad(batch["response_ids"], (0, 1))
    mask = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
    return batch.with_columns(response_ids=ids, response_length=lengths, response_mask=mask)
