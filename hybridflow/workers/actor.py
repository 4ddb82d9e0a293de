"""The actor: the policy in training, and the place where credit is assigned."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.algorithms.advantages import needs_of
from hybridflow.algorithms.agreement import AGREEMENT_READS, sampler_agreement
from hybridflow.algorithms.contract import Counts, Loss
from hybridflow.algorithms.credit import assign_credit, credit_reads
from hybridflow.algorithms.lagrange import assign_cost_credit, cost_reads
from hybridflow.algorithms.losses import ActorLoss
from hybridflow.algorithms.policy_loss import needs_of as loss_needs
from hybridflow.algorithms.pretraining import PretrainingMix
from hybridflow.algorithms.rewards import RewardNormalizer
from hybridflow.batch.batch import Batch
from hybridflow.config.actor import ActorRolloutRefConfig
from hybridflow.config.model import ModelConfig
from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.engines.train.base import MicroBatching, TrainEngine
from hybridflow.engines.train.registry import TRAIN_ENGINES
from hybridflow.hybrid_engine.layouts import TrainingLayout
from hybridflow.roles.protocols import Metrics
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.optional import load
from hybridflow.workers.minibatch import micro_batching
from hybridflow.workers.out_of_memory import explained
from hybridflow.workers.pretraining import load_pretraining
from hybridflow.workers.saving import TrainedWorker
from hybridflow.workers.skips import Skips
from hybridflow.workers.update import Schedule, update_epochs

logger = logging.getLogger(__name__)

NORMALIZER_FILE = "reward_statistics.json"
SEQUENCE = ("prompt_ids", "prompt_length", "response_ids", "response_length", "response_mask")
"""Columns that a forward over whole sequences reads."""
CREDIT = (
    "old_log_probs?",
    "advantages",
    "loss_mask",
    "ref_log_probs?",
    "correction_weights?",
    "covariance_selected?",
    "rollout_log_probs",
)
"""Columns that policy losses read, where they are."""


def _credit_reads(arguments: Mapping[str, Any]) -> tuple[str, ...] | None:
    reads = credit_reads(arguments["config"].algorithm)
    return None if reads is None else (*reads, *AGREEMENT_READS)


def _update_reads(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    loss_mode = arguments["config"].actor_rollout_ref.actor.policy_loss.loss_mode
    return (*SEQUENCE, *CREDIT, "row_index", *sorted(loss_needs(loss_mode)))


def _cost_reads(arguments: Mapping[str, Any]) -> tuple[str, ...] | None:
    config = arguments["config"]
    return cost_reads(config.algorithm, config.actor_rollout_ref.actor.policy_loss)


class ActorWorker(TrainedWorker):
    """One rank of the policy.

    Args:
        context: where this rank runs.
        config: the whole configuration.
        dims: training layout.
        total_steps: trainer steps of the run (for the learning-rate schedule); None: it needs none.
        rollout_tp: tensor-parallel size of the generator; decides the order of shards.
        model_path: folder of the weights.
        vocab_limit: ids from here on are never sampled (rows of the embedding beyond the tokenizer).
        tokenizer_path: folder of the tokenizer that reads the text of PPO-ptx.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        config: PPOConfig,
        dims: ParallelDims,
        total_steps: int | None,
        rollout_tp: int,
        model_path: str,
        vocab_limit: int | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        policy = config.actor_rollout_ref
        actor = policy.actor
        self._config = config
        self._context = context
        self._sharding = actor.sharding
        self.make_room: Callable[[], None] = lambda: None
        """Called before the actor needs the devices; the weights worker puts the generator to sleep here."""
        self._reference_at_work: Callable[[], AbstractContextManager[None]] = nullcontext
        self._temperature = policy.rollout.temperature
        self._needs_squares = "old_sum_pi_squared" in (needs_of(config.algorithm.adv_estimator) or ())
        self._checkpoint = actor.checkpoint
        self._schedule = _schedule(config)
        self._skips = Skips(
            "actor",
            rank=context.rank,
            config=config,
            source={"model_path": model_path, "vocab_limit": vocab_limit, "tokenizer_path": tokenizer_path},
        )
        units = self._schedule.units(total_steps, config.data.train_batch_size * policy.rollout.n)
        model = replace(policy.model, path=model_path)
        self.engine = self._build_engine(model, dims, units, rollout_tp=rollout_tp, vocab_limit=vocab_limit)
        self._loss = _loss(config)
        self._pretraining = None
        if config.algorithm.ptx_coef > 0:
            assert tokenizer_path is not None
            at, size = dims.dp_coordinate(context.rank), self._schedule.mini_rows
            self._pretraining = load_pretraining(config, tokenizer_path, size=size, coordinate=at, coordinates=dims.dp)
        shaping = config.algorithm.reward_shaping
        self._normalizer = RewardNormalizer(momentum=shaping.normalize_momentum) if shaping.normalize else None
        self._train_micro, self._forward_micro = _micro_batchings(policy, dims.sp)

    def _build_engine(
        self,
        model: ModelConfig,
        dims: ParallelDims,
        units: int | None,
        *,
        rollout_tp: int,
        vocab_limit: int | None,
    ) -> TrainEngine:
        layout = TrainingLayout.for_rollout(dims, rollout_tp)
        actor = self._config.actor_rollout_ref.actor
        return load(TRAIN_ENGINES[actor.strategy])(
            model=model,
            head="lm",
            sharding=self._sharding,
            dims=dims,
            optim=actor.optim,
            grad_clip=actor.grad_clip,
            device=self._context.device,
            total_steps=units,
            seed=self._config.trainer.seed,
            vocab_limit=vocab_limit,
            compile_layers=actor.use_torch_compile,
            share_prompts=self._config.shares_prompts("actor"),
            pipeline_schedule=actor.pipeline_schedule,
            shard_order=layout.rank_order,
            row_parallel_shard_dim1=layout.row_parallel_shard_dim1,
        )

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Has the devices for the actor inside."""
        self.make_room()
        with super().at_work():
            yield

    def compare_with(self, reference: TrainEngine, at_work: Callable[[], AbstractContextManager[None]]) -> None:
        """Makes ``reference`` the other side of the exact KL; ``at_work`` has the devices for it inside."""
        self.engine.compare_with(reference)
        self._reference_at_work = at_work

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Has the devices inside, and explains where their memory went when it does not suffice."""
        with self.at_work(), self._reference_at_work(), explained(name, self._config):
            yield

    @register(
        dispatch="MESH_3D", reads=SEQUENCE, writes=("old_log_probs", "old_entropy", "full_kl?", "old_sum_pi_squared?")
    )
    def compute_log_prob(self, batch: Batch) -> Batch:
        """old_log_probs and old_entropy, ``[b, T]`` float32 nats of the tempered distribution.

        Also full_kl, where the exact KL is in the reward, and old_sum_pi_squared, where the estimator reads it.
        """
        needs = {"log_probs"} | ({"entropy"} if self._config.actor_rollout_ref.actor.calculate_entropy else set())
        needs |= {"full_kl"} if self._config.exact_kl_in_reward else set()
        needs |= {"sum_pi_squared"} if self._needs_squares else set()
        with self._phase("compute_log_prob"):
            found = self.engine.forward(
                batch, frozenset(needs), temperature=self._temperature, micro=self._forward_micro
            )
        self.engine.work()  # the metrics of its work are those of updates
        entropy = found.pop("entropy", torch.zeros_like(found["log_probs"]))
        squares = {"old_sum_pi_squared": found.pop("sum_pi_squared")} if self._needs_squares else {}
        return Batch({"old_log_probs": found.pop("log_probs"), "old_entropy": entropy, **squares, **found})

    @register(dispatch="RANK_ZERO", reads=_credit_reads)
    def compute_advantage(self, batch: Batch, *, kl_coef: float = 0.0) -> tuple[Batch, Metrics]:
        """Columns and metrics of credit assignment over the whole batch, and how well sampler and trainer agree."""
        credit, metrics = assign_credit(
            batch,
            self._config.algorithm,
            kl_coef=kl_coef,
            max_response_length=self._config.response_length,
            overlong=self._config.reward.overlong,
            normalizer=self._normalizer,
            policy_loss=self._config.actor_rollout_ref.actor.policy_loss,
        )
        return credit, {**metrics, **sampler_agreement(batch.with_columns(**credit.columns()))}

    @register(dispatch="RANK_ZERO", reads=_cost_reads)
    def compute_cost_advantage(self, batch: Batch, *, multiplier: float) -> tuple[Batch, Metrics]:
        """Advantages of reward and cost in one, over the whole batch (algorithms/lagrange.py)."""
        policy_loss = self._config.actor_rollout_ref.actor.policy_loss
        return assign_cost_credit(batch, self._config.algorithm, multiplier=multiplier, policy_loss=policy_loss)

    @register(dispatch="MESH_3D", reads=_update_reads)
    def update_actor(self, batch: Batch, *, total_rows: int, step: int) -> Metrics:
        """All mini-batches and epochs of one trainer step; metrics (but for times) are the same on every rank."""
        with self._phase("update_actor"):
            return update_epochs(
                self.engine,
                batch,
                self._loss,
                schedule=self._schedule,
                temperature=self._temperature,
                micro=self._train_micro,
                total_rows=total_rows,
                step=step,
                prefix="actor",
                pretraining=self._pretraining,
                find_anomaly=self._config.trainer.anomaly_detection,
                skips=self._skips,
            )

    def update_once(self, rows: Batch, counts: Counts) -> Metrics:
        """One optimizer step on ``rows``; for ``python -m hybridflow.replay``."""
        return self.engine.update(
            rows, self._loss, temperature=self._temperature, micro=self._train_micro, counts=counts
        )

    @register(dispatch="ONE_TO_ALL")
    def save_checkpoint(self, folder: str) -> None:
        """See ``TrainedWorker``; rank 0, which assigns credit, writes running reward statistics too."""
        super().save_checkpoint(folder)
        if self._normalizer is not None and self._context.rank == 0 and "extra" in self._checkpoint.save_contents:
            (Path(folder) / NORMALIZER_FILE).write_text(json.dumps(self._normalizer.state_dict()))

    @register(dispatch="ONE_TO_ALL")
    def load_checkpoint(self, folder: str) -> None:
        """See ``TrainedWorker``."""
        super().load_checkpoint(folder)
        if self._normalizer is not None and self._context.rank == 0 and "extra" in self._checkpoint.load_contents:
            statistics = Path(folder) / NORMALIZER_FILE
            if statistics.exists():
                self._normalizer.load_state_dict(json.loads(statistics.read_text()))
            else:
                logger.warning("%s was saved without reward normalisation: its running statistics start anew", folder)


def _schedule(config: PPOConfig) -> Schedule:
    """How the rows of a trainer step become optimizer steps."""
    actor, samples = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    return Schedule(
        mini_rows=actor.ppo_mini_batch_size * samples,
        group_size=samples,
        epochs=actor.ppo_epochs,
        shuffle_seed=config.trainer.seed if actor.shuffle else None,
        unit=actor.optim.schedule_unit,
    )


def _loss(config: PPOConfig) -> Loss:
    """The policy's loss, with that on text mixed in where it is asked for."""
    actor = config.actor_rollout_ref.actor
    loss = ActorLoss(
        actor,
        max_response_length=config.response_length,
        correction=config.algorithm.rollout_correction,
        # Without the pass for old log-probs, the update's own forward is the place to measure it.
        measure_entropy=actor.calculate_entropy and not config.recomputes_old_log_probs,
    )
    coefficient = config.algorithm.ptx_coef
    return PretrainingMix(loss, coefficient) if coefficient > 0 else loss


def _micro_batchings(policy: ActorRolloutRefConfig, sp: int) -> tuple[MicroBatching, MicroBatching]:
    """How an update is cut, and how a forward pass for log-probs is."""
    actor, rollout = policy.actor, policy.rollout
    update = micro_batching(
        dynamic=actor.use_dynamic_bsz,
        tokens_per_device=actor.ppo_max_token_len_per_gpu,
        rows=actor.ppo_micro_batch_size_per_gpu,
        sp=sp,
    )
    forward = micro_batching(
        dynamic=rollout.log_prob_use_dynamic_bsz,
        tokens_per_device=rollout.log_prob_max_token_len_per_gpu,
        rows=rollout.log_prob_micro_batch_size_per_gpu,
        sp=sp,
    )
    return update, forward
