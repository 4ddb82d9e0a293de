"""The whole configuration of ``main_ppo``."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.config.actor import ActorRolloutRefConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.checks import VALUE_ESTIMATORS, across
from hybridflow.config.choices import ADV_ESTIMATORS, EXACT_KL, POLICY_LOSSES
from hybridflow.config.constraints import Section, check_fields
from hybridflow.config.critic import CriticConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.profiler import ProfilerConfig
from hybridflow.config.reward import RewardConfig
from hybridflow.config.trainer import RayConfig, TrainerConfig

OUTCOME_ESTIMATORS = frozenset(ADV_ESTIMATORS) - {"optimal_token_baseline", "tir_optimal_token_baseline"}
"""Estimators that read no log-probs."""
SINGLE_PASS_LOSSES = frozenset(POLICY_LOSSES) - {"clip_cov", "kl_cov"}
"""Policy losses for which the current log-probs serve as old ones in the first update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig(Section):
    """Root of the tree; every leaf's key is its dotted path from here."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """Policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Value model."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scores."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Credit assignment."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """Where time and memory go."""
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
    """Ray."""

    def __post_init__(self) -> None:
        check_fields(self, across(self))

    @property
    def needs_critic(self) -> bool:
        """Whether values are part of the dataflow."""
        if self.critic.enable is not None:
            return self.critic.enable
        return self.algorithm.adv_estimator in VALUE_ESTIMATORS

    @property
    def needs_cost_critic(self) -> bool:
        """Whether values of the cost are part of the dataflow (Safe-RLHF beside a critic)."""
        return self.algorithm.safe_rlhf.enable and self.needs_critic

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to the reference is asked for anywhere."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def exact_kl_in_reward(self) -> bool:
        """Whether the KL in the reward is exact over the vocabulary."""
        return self.algorithm.use_kl_in_reward and self.algorithm.kl_penalty in EXACT_KL

    @property
    def needs_exact_kl(self) -> bool:
        """Whether the actor evaluates the reference on its own micro-batches."""
        actor = self.actor_rollout_ref.actor
        return self.exact_kl_in_reward or (actor.use_kl_loss and actor.kl_loss_type in EXACT_KL)

    @property
    def needs_ref_log_probs(self) -> bool:
        """Whether the reference's log-probs of the sampled tokens are read: the exact KL does without them.

        ``full+`` in the loss takes its gradient from them, and a user's own functions may read them.
        """
        algorithm, actor = self.algorithm, self.actor_rollout_ref.actor
        own = algorithm.adv_estimator not in ADV_ESTIMATORS or actor.policy_loss.loss_mode not in POLICY_LOSSES
        sampled = (algorithm.use_kl_in_reward and not self.exact_kl_in_reward) or (
            actor.use_kl_loss and actor.kl_loss_type != "full"
        )
        return self.needs_reference and (sampled or own)

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt at most."""
        return self.actor_rollout_ref.rollout.prompt_length or self.data.max_prompt_length

    @property
    def response_length(self) -> int:
        """Tokens of a response at most."""
        return self.actor_rollout_ref.rollout.response_length or self.data.max_response_length

    @property
    def recomputes_old_log_probs(self) -> bool:
        """Whether the trainer's log-probs of the sampled tokens are computed before the update.

        Not where the sampler's stand in for them (bypass mode), and not where every token is trained once by the very
        policy that sampled it: the update's own forward then gives the same numbers. Credit assignment that reads them
        (KL in the reward, mismatch correction, covariance losses, token baselines, a user's own functions) asks too.
        """
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        correction = algorithm.rollout_correction
        if correction.bypass_mode:
            return False
        once = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == self.data.train_batch_size
        corrects = (
            correction.rollout_is,
            correction.rollout_rs,
            correction.rollout_token_veto_threshold,
            correction.guard_max_log_ratio,
        )
        reads = (
            algorithm.use_kl_in_reward
            or any(choice is not None for choice in corrects)
            or algorithm.adv_estimator not in OUTCOME_ESTIMATORS
            or actor.policy_loss.loss_mode not in SINGLE_PASS_LOSSES
        )
        return reads or not once

    @property
    def model_length(self) -> int:
        """Tokens of context that the generator keeps."""
        return self.actor_rollout_ref.rollout.max_model_len or self.prompt_length + self.response_length

    @property
    def critic_mini_batch_size(self) -> int:
        """Prompts per optimizer step of the critic."""
        return self.critic.ppo_mini_batch_size or self.actor_rollout_ref.actor.ppo_mini_batch_size

    @property
    def critic_epochs(self) -> int:
        """Passes of the critic over the batch of a step."""
        return self.critic.ppo_epochs or self.actor_rollout_ref.actor.ppo_epochs

    def shares_prompts(self, role: str) -> bool:
        """Whether ``role`` encodes a prompt once for all its samples."""
        policy = self.actor_rollout_ref
        if role == "reference" and policy.ref.use_prefix_grouper is not None:
            return policy.ref.use_prefix_grouper
        if role in ("actor", "reference"):
            return policy.actor.use_prefix_grouper
        return role in ("critic", "cost_critic") and self.critic.use_prefix_grouper

    def pool_of(self, role: str) -> str:
        """Name of the pool that hosts ``role``; ``main`` unless ``trainer.pools`` says otherwise."""
        named = "reward" if role == "reward_model" else role
        return next((name for name, pool in self.trainer.pools.items() if named in pool.roles), "main")

    @property
    def rollout_shares_devices(self) -> bool:
        """Whether actor and generator live in the same processes and take turns (the 3D-HybridEngine)."""
        return self.pool_of("rollout") == self.pool_of("actor")

    def world_of(self, role: str) -> int:
        """Slots of the pool that hosts ``role``."""
        name = self.pool_of(role)
        if name == "main":
            return self.trainer.nnodes * self.trainer.n_gpus_per_node
        return sum(self.trainer.pools[name].slots)
