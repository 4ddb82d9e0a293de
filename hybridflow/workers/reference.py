"""The reference: the policy as it was at the start, forward only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.engines.train.base import TrainEngine
from hybridflow.engines.train.registry import TRAIN_ENGINES
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.optional import load
from hybridflow.workers.actor import SEQUENCE, ActorWorker
from hybridflow.workers.costs import work_metrics
from hybridflow.workers.minibatch import micro_batching
from hybridflow.workers.out_of_memory import explained
from hybridflow.workers.residence import resident


class ReferenceWorker:
    """One rank of the frozen policy; arguments as the actor's.

    With LoRA the policy of the start is the actor without its adapters: where the actor lives in the same process, at
    the same layout, its engine serves both and no second model is loaded. Where the exact KL is asked for, the actor
    evaluates this engine on its own micro-batches.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        config: PPOConfig,
        dims: ParallelDims,
        model_path: str,
        vocab_limit: int | None = None,
    ) -> None:
        policy = config.actor_rollout_ref
        self._config = config
        self._temperature = policy.rollout.temperature
        self._micro = micro_batching(
            dynamic=policy.ref.log_prob_use_dynamic_bsz,
            tokens_per_device=policy.ref.log_prob_max_token_len_per_gpu,
            rows=policy.ref.log_prob_micro_batch_size_per_gpu,
            sp=dims.sp,
        )
        self._work: Mapping[str, float] = {}
        actor: ActorWorker | None = context.siblings.get("actor")
        if policy.model.lora_rank > 0 and actor is not None and actor.engine.dims == dims:
            self._engine, self._own = actor.engine, False
            self._forward, self._at_work = actor.engine.forward_without_adapters, actor.at_work
            if config.needs_exact_kl:
                actor.engine.compare_with(actor.engine)
            return
        engine: TrainEngine = load(TRAIN_ENGINES[policy.ref.strategy])(
            model=replace(policy.model, path=model_path),
            head="lm",
            sharding=policy.ref.sharding,
            dims=dims,
            optim=None,
            grad_clip=0.0,
            device=context.device,
            total_steps=None,
            seed=config.trainer.seed,
            vocab_limit=vocab_limit,
            compile_layers=policy.ref.use_torch_compile,
            share_prompts=config.shares_prompts("reference"),
        )
        self._engine, self._own = engine, True
        self._forward, self._at_work = engine.forward, lambda: resident(engine, policy.ref.sharding)
        if config.needs_exact_kl:
            assert actor is not None  # config/checks.py: the exact KL keeps both in one pool
            actor.compare_with(engine, self._at_work)

    @register(dispatch="MESH_3D", reads=SEQUENCE, writes=("ref_log_probs",))
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        """ref_log_probs, ``[b, T]`` float32 nats of the tempered distribution."""
        start = time.perf_counter()
        with self._at_work(), explained("compute_ref_log_prob", self._config):
            found = self._forward(batch, frozenset({"log_probs"}), temperature=self._temperature, micro=self._micro)
        self._work = work_metrics(self._engine, time.perf_counter() - start, "reference")
        return Batch({"ref_log_probs": found["log_probs"]})

    def take_work(self) -> Mapping[str, float]:
        """Metrics of the last forward."""
        work, self._work = self._work, {}
        return work

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes of parameters on this rank; none where the actor's engine serves both."""
        return self._engine.held_bytes() if self._own else {}
