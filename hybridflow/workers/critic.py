"""The critic: a value head on the policy's architecture, with its own optimizer and layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hybridflow.algorithms.contract import Counts
from hybridflow.algorithms.losses import CriticLoss
from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.group import RankContext
from hybridflow.dispatch.register import register
from hybridflow.engines.train.base import TrainEngine
from hybridflow.engines.train.registry import TRAIN_ENGINES
from hybridflow.roles.protocols import Metrics
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.optional import load
from hybridflow.workers.actor import SEQUENCE
from hybridflow.workers.minibatch import micro_batching
from hybridflow.workers.out_of_memory import explained
from hybridflow.workers.saving import TrainedWorker
from hybridflow.workers.skips import Skips
from hybridflow.workers.update import Schedule, update_epochs


class CriticWorker(TrainedWorker):
    """One rank of a value model: the critic, or with Safe-RLHF the cost critic; further arguments as the actor's."""

    def __init__(
        self,
        context: RankContext,
        *,
        config: PPOConfig,
        dims: ParallelDims,
        total_steps: int | None,
        model_path: str,
        role: str = "critic",
    ) -> None:
        critic, actor = config.critic, config.actor_rollout_ref.actor
        group_size = config.actor_rollout_ref.rollout.n
        self._schedule = Schedule(
            mini_rows=(critic.ppo_mini_batch_size or actor.ppo_mini_batch_size) * group_size,
            group_size=group_size,
            epochs=critic.ppo_epochs or actor.ppo_epochs,
            shuffle_seed=config.trainer.seed if critic.shuffle else None,
            unit=critic.optim.schedule_unit,
        )
        self._skips = Skips(role, rank=context.rank, config=config, source={"model_path": model_path})
        self._sharding = critic.sharding
        self._checkpoint = critic.checkpoint
        self.engine: TrainEngine = load(TRAIN_ENGINES[critic.strategy])(
            model=replace(critic.model, path=model_path),
            head="value",
            sharding=self._sharding,
            dims=dims,
            optim=critic.optim,
            grad_clip=critic.grad_clip,
            device=context.device,
            total_steps=self._schedule.units(total_steps, config.data.train_batch_size * group_size),
            seed=config.trainer.seed,
            share_prompts=config.shares_prompts("critic"),
            pipeline_schedule=critic.pipeline_schedule,
        )
        self._config = config
        self._loss = CriticLoss(critic, max_response_length=config.response_length)
        self._train_micro = micro_batching(
            dynamic=critic.use_dynamic_bsz,
            tokens_per_device=critic.ppo_max_token_len_per_gpu,
            rows=critic.ppo_micro_batch_size_per_gpu,
            sp=dims.sp,
        )
        self._forward_micro = micro_batching(
            dynamic=critic.use_dynamic_bsz,
            tokens_per_device=critic.ppo_max_token_len_per_gpu,
            rows=critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu,
            sp=dims.sp,
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Has the devices inside, and explains where their memory went when it does not suffice."""
        with self.at_work(), explained(name, self._config, critic=True):
            yield

    @register(dispatch="MESH_3D", reads=SEQUENCE, writes=("values",))
    def compute_values(self, batch: Batch) -> Batch:
        """values, ``[b, T]`` float32: return expected before each response token (never tempered)."""
        with self._phase("compute_values"):
            found = self.engine.forward(batch, frozenset({"values"}), temperature=1.0, micro=self._forward_micro)
        self.engine.work()  # the metrics of its work are those of updates
        return Batch({"values": found["values"]})

    @register(dispatch="MESH_3D", reads=(*SEQUENCE, "values", "returns", "loss_mask", "row_index"))
    def update_critic(self, batch: Batch, *, total_rows: int, step: int) -> Metrics:
        """All mini-batches and epochs of one trainer step."""
        with self._phase("update_critic"):
            return update_epochs(
                self.engine,
                batch,
                self._loss,
                schedule=self._schedule,
                temperature=1.0,
                micro=self._train_micro,
                total_rows=total_rows,
                step=step,
                prefix="critic",
                find_anomaly=self._config.trainer.anomaly_detection,
                skips=self._skips,
            )

    def update_once(self, rows: Batch, counts: Counts) -> Metrics:
        """One optimizer step on ``rows``; for ``python -m hybridflow.replay``."""
        return self.engine.update(rows, self._loss, temperature=1.0, micro=self._train_micro, counts=counts)
