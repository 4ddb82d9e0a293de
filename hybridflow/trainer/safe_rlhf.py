"""Safe-RLHF (arXiv:2310.12773): PPO's dataflow with a cost beside the reward.

    score: + cost, cost_values    credit: advantages of both, weighted by the multiplier    learn: + cost critic

The multiplier used in a step is the one that earlier steps have learned; it is saved with the run's checkpoints.
"""

from __future__ import annotations

from hybridflow.algorithms.lagrange import LagrangeMultiplier
from hybridflow.algorithms.rewards import reward_components
from hybridflow.batch.batch import Batch
from hybridflow.config.root import PPOConfig
from hybridflow.roles.protocols import Roles
from hybridflow.trainer.ppo import PPOTrainer
from hybridflow.trainer.run import Run


class SafeRLHFTrainer(PPOTrainer):
    """Adds the cost, its critic (where the estimator needs values) and the multiplier."""

    def __init__(self, roles: Roles, run: Run, config: PPOConfig) -> None:
        super().__init__(roles, run, config)
        self.multiplier = LagrangeMultiplier(config.algorithm.safe_rlhf)
        run.keep("safe_rlhf", self.multiplier)

    def score(self, batch: Batch) -> Batch:
        """Adds cost, and cost_values where there is a cost critic; a row without a cost is not valid."""
        critic = self.roles.cost_critic
        values = None if critic is None else critic.compute_values(batch)
        batch = super().score(batch)
        keys = (self.config.algorithm.safe_rlhf.cost_key,)
        cost = reward_components(reward_info=batch.objects("reward_info"), keys=keys, scored=batch["valid"])[:, 0]
        batch = batch.with_columns(cost=cost, valid=batch["valid"] & cost.isfinite())
        if values is not None:
            batch = batch.with_columns(**self.wait("cost_values", values).columns())
        return batch

    def assign_credit(self, batch: Batch) -> Batch:
        """Adds what PPO adds; advantages are those of reward and cost in one. Then the multiplier learns."""
        batch = super().assign_credit(batch)
        call = self.roles.actor.compute_cost_advantage(batch, multiplier=self.multiplier.value)
        credit, metrics = self.wait("cost_adv", call)
        self.run.record(metrics)
        if "safe_rlhf/cost/mean" in metrics:  # a batch without a single usable row says nothing
            self.multiplier.update(mean_cost=metrics["safe_rlhf/cost/mean"])
        return batch.with_columns(**credit.columns())

    def learn(self, batch: Batch, step: int) -> None:
        """Updates the cost critic too."""
        critic = self.roles.cost_critic
        call = None if critic is None else critic.update_critic(batch, step=step)
        super().learn(batch, step)
        if call is not None:
            self.run.record(self.wait("update_cost_critic", call))
