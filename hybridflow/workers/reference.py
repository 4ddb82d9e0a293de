"""The reference: the policy as it was at the start, forward only."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.engines.train.base import TrainEngine
from hybridflow.engines.train.registry import TRAIN_ENGINES
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.optional import load
from hybridflow.workers.actor import SEQUENCE
from hybridflow.workers.minibatch import micro_batching
from hybridflow.workers.residence import resident


class ReferenceWorker:
    """One rank of the frozen policy; arguments as the actor's."""

    def __init__(self, context: RankContext, *, config: PPOConfig, dims: ParallelDims, model_path: str) -> None:
        policy = config.actor_rollout_ref
        self._temperature = policy.rollout.temperature
        self._sharding = policy.ref.sharding
        self.engine: TrainEngine = load(TRAIN_ENGINES[policy.ref.strategy])(
            model=replace(policy.model, path=model_path),
            head="lm",
            sharding=self._sharding,
            dims=dims,
            optim=None,
            grad_clip=0.0,
            device=context.device,
            total_steps=None,
            seed=config.trainer.seed,
        )
        self._micro = micro_batching(
            dynamic=policy.ref.log_prob_use_dynamic_bsz,
            tokens_per_device=policy.ref.log_prob_max_token_len_per_gpu,
            rows=policy.ref.log_prob_micro_batch_size_per_gpu,
            sp=dims.sp,
        )

    @register(dispatch="MESH_3D", reads=SEQUENCE, writes=("ref_log_probs",))
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        """ref_log_probs, ``[b, T]`` float32 nats of the tempered distribution."""
        with resident(self.engine, self._sharding):
            found = self.engine.forward(
                batch, frozenset({"log_probs"}), temperature=self._temperature, micro=self._micro
            )
        return Batch({"ref_log_probs": found["log_probs"]})
