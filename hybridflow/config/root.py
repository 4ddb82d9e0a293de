"""The whole configuration of ``main_ppo``."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.config.actor import ActorRolloutRefConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.constraints import Section
from hybridflow.config.critic import CriticConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.reward import RewardConfig
from hybridflow.config.trainer import RayConfig, TrainerConfig

VALUE_ESTIMATORS = frozenset({"gae"})
"""Estimators that need a critic."""


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
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
    """Ray."""

    @property
    def needs_critic(self) -> bool:
        """Whether values are part of the dataflow."""
        if self.critic.enable is not None:
            return self.critic.enable
        return self.algorithm.adv_estimator in VALUE_ESTIMATORS

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to the reference is asked for anywhere."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
