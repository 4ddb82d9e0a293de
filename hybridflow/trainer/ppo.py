"""The dataflow of PPO and everything that shares it: four stages a step, and nothing else.

    prompts -> rollout -> {reward | old log-probs | ref log-probs | values} -> advantages -> {critic | actor} -> weights

Calls return a ``Pending``; ``gather`` is the only wait, so calls between two gathers overlap when their roles own
different devices and queue when they share. GRPO, RLOO and the other critic-free estimators are this loop with
``roles.critic`` absent.
"""

from __future__ import annotations

from typing import TypeVar

from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import Pending, gather
from hybridflow.config.root import PPOConfig
from hybridflow.roles.protocols import Roles
from hybridflow.trainer.dynamic_sampling import fill
from hybridflow.trainer.run import Run

T = TypeVar("T")


class PPOTrainer:
    """Drives the roles through the steps of a run.

    Args:
        roles: who plays.
        run: prompts, cadence, metrics, checkpoints.
        config: the whole configuration.
    """

    def __init__(self, roles: Roles, run: Run, config: PPOConfig) -> None:
        self.roles = roles
        self.run = run
        self.config = config

    def fit(self) -> None:
        """Runs steps ``resumed + 1 .. total``. A role's failure propagates; nothing is retried here."""
        done = self.run.restore()
        self.publish(version=done)
        self.run.before(done)
        for step in self.run.steps(done):
            with self.run.step(step):
                self.step(step)
            self.run.after(step)
        self.run.end()

    def step(self, step: int) -> None:
        """The dataflow of one step; the rows that ranks keep for its batch are freed on return."""
        batch = self.generate(step)
        if len(batch) > 0:  # dynamic sampling may find no group that teaches anything
            batch = self.score(batch)
            batch = self.assign_credit(batch)
            self.learn(batch, step)
            self.publish(version=step)

    def generate(self, step: int) -> Batch:
        """``n`` responses for each prompt of the step; under dynamic sampling of prompts that teach something."""
        settings, limit = self.config.algorithm.filter_groups, self.config.reward.max_failed_share
        if not settings.enable:
            return self.sample(step)
        prompts = self.config.data.train_batch_size
        batch, metrics = fill(lambda: self.judge(self.sample(step)), settings, groups=prompts, max_failed_share=limit)
        self.run.record(metrics)
        return batch

    def sample(self, step: int) -> Batch:
        """``n`` responses for each of the next prompts: the rollout's columns beside the prompts'."""
        prompts = self.run.next_prompts(self.config.actor_rollout_ref.rollout.n)
        return prompts.merge(self.wait("gen", self.roles.rollout.generate_sequences(prompts, step=step)))

    def judge(self, batch: Batch) -> Batch:
        """Adds score, reward_info, response_text and a narrowed valid."""
        return batch.with_columns(**self.wait("reward", self.roles.reward.compute_reward(batch)).columns())

    def score(self, batch: Batch) -> Batch:
        """Adds score and valid, and what is read of old_log_probs (with full_kl), ref_log_probs and values."""
        calls: dict[str, Pending[Batch]] = {}
        if "score" not in batch:
            calls["reward"] = self.roles.reward.compute_reward(batch)
        if self.config.recomputes_old_log_probs:
            calls["old_log_prob"] = self.roles.actor.compute_log_prob(batch)
        if self.roles.reference is not None and self.config.needs_ref_log_probs:
            calls["ref"] = self.roles.reference.compute_ref_log_prob(batch)
        if self.roles.critic is not None:
            calls["values"] = self.roles.critic.compute_values(batch)
        for name, call in calls.items():
            batch = batch.with_columns(**self.wait(name, call).columns())
        self.run.note_scores(batch)
        return batch

    def assign_credit(self, batch: Batch) -> Batch:
        """Adds loss_mask, token_rewards, advantages and returns."""
        credit, metrics = self.wait("adv", self.roles.actor.compute_advantage(batch, kl_coef=self.run.kl.value))
        self.run.record(metrics)
        if "actor/reward_kl_penalty" in metrics:
            self.run.kl.update(kl=metrics["actor/reward_kl_penalty"], sequences=len(batch))
        return batch.with_columns(**credit.columns())

    def learn(self, batch: Batch, step: int) -> None:
        """Updates the critic, and after its warm-up the actor."""
        calls = {}
        if self.roles.critic is not None:
            calls["update_critic"] = self.roles.critic.update_critic(batch, step=step)
        if step > self.config.trainer.critic_warmup:
            calls["update_actor"] = self.roles.actor.update_actor(batch, step=step)
        for name, call in calls.items():
            self.run.record(self.wait(name, call))
        self.run.observe(batch)

    def publish(self, *, version: int) -> None:
        """Moves the actor's weights into the generator."""
        self.run.record(self.wait("update_weights", self.roles.weights.publish(version=version)))

    def wait(self, name: str, call: Pending[T]) -> T:
        """The result of ``call``, whose time becomes ``timing_s/<name>``."""
        result = gather(call)
        self.run.took(name, call.seconds)
        return result
