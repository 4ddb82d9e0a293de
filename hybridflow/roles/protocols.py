"""The typed vocabulary of the trainer: what each role can be asked, never where it runs.

Every call returns a ``Pending`` at once. A ``Batch`` that comes back holds only the columns the call adds, in the row
order of its argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import Pending
from hybridflow.roles.profiles import CallProfile, StepCosts

Metrics = Mapping[str, float]
SamplingMode = Literal["train", "validate", "greedy"]
"""``train``: rollout.*; ``validate``: rollout.val_kwargs; ``greedy``: temperature 0."""


class Rollout(Protocol):
    """The generator."""

    def generate_sequences(self, prompts: Batch, *, step: int, mode: SamplingMode = "train") -> Pending[Batch]:
        """Adds response_ids, response_length, response_mask, rollout_log_probs, weight_version, finish_reason, valid.

        ``prompts`` holds one row per *response* (prompts are already repeated, ``sample_index`` set). Seeds depend on
        (step, group, sample) in training and on (dataset row, sample) in validation, never on a counter.
        """
        ...


class Actor(Protocol):
    """The policy in training."""

    def compute_log_prob(self, batch: Batch) -> Pending[Batch]:
        """Adds old_log_probs and old_entropy, and what else of the old policy credit assignment reads."""
        ...

    def compute_advantage(self, batch: Batch, *, kl_coef: float = 0.0) -> Pending[tuple[Batch, Metrics]]:
        """Adds token_rewards, advantages and returns (and correction weights); metrics of credit assignment."""
        ...

    def compute_cost_advantage(self, batch: Batch, *, multiplier: float) -> Pending[tuple[Batch, Metrics]]:
        """Safe-RLHF: advantages of reward and cost in one, and cost_returns where there are cost_values."""
        ...

    def update_actor(self, batch: Batch, *, step: int) -> Pending[Metrics]:
        """All mini-batches and epochs of one step."""
        ...


class Critic(Protocol):
    """The value model."""

    def compute_values(self, batch: Batch) -> Pending[Batch]:
        """Adds values."""
        ...

    def update_critic(self, batch: Batch, *, step: int) -> Pending[Metrics]:
        """All mini-batches and epochs of one step."""
        ...


class Reference(Protocol):
    """The frozen policy."""

    def compute_ref_log_prob(self, batch: Batch) -> Pending[Batch]:
        """Adds ref_log_probs."""
        ...


class Reward(Protocol):
    """The scorer."""

    def compute_reward(self, batch: Batch) -> Pending[Batch]:
        """Adds score, reward_info and a narrowed valid."""
        ...


class Weights(Protocol):
    """The way from the actor's weights to the generator's."""

    def publish(self, *, version: int, between_steps: bool = False) -> Pending[Metrics]:
        """On return every generation rank holds ``version``.

        ``between_steps``: also while a generation runs, after its next engine step but one; what becomes of its
        requests is ``rollout.checkpoint_engine.in_flight``, and each token's ``weight_version`` says which weights
        wrote it. Nothing else may be called on the group between that generation and this.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishNow:
    """A message of the control lane to a generator: bring new weights between two of your steps.

    A generator that is idle leaves it to the call that waits behind it on the work lane.
    """

    version: int
    after_steps: int = 0
    """Engine steps of the running generation that come first."""


@dataclass(frozen=True, slots=True)
class Broken:
    """What a rank of the trainers returns of a link to a replica that broke; its part of the link is gone."""

    reason: str
    """The traceback."""


class Observer(Protocol):
    """Looks on in every process of a pool."""

    def begin_step(self) -> Pending[None]:
        """Forgets what came before."""
        ...

    def step_costs(self) -> Pending[list[StepCosts]]:
        """What every rank has done since ``begin_step``."""
        ...

    def start_profile(self, folder: str) -> Pending[None]:
        """Records calls from now on."""
        ...

    def finish_profile(self) -> Pending[list[CallProfile]]:
        """What every call cost, rank by rank."""
        ...


class Checkpointed(Protocol):
    """Anything with state on disk."""

    def save_checkpoint(self, folder: str) -> Pending[None]:
        """Writes its state into ``folder``, or begins to: ``finish_checkpoint`` completes it."""
        ...

    def checkpoint_written(self) -> Pending[bool]:
        """Whether nothing is left to write."""
        ...

    def finish_checkpoint(self) -> Pending[None]:
        """Waits for what is being written and completes it."""
        ...

    def load_checkpoint(self, folder: str) -> Pending[None]:
        """Restores it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Who plays in a run; an optional role that is not needed is None."""

    actor: Actor
    rollout: Rollout
    weights: Weights
    reward: Reward
    critic: Critic | None = None
    cost_critic: Critic | None = None
    """Safe-RLHF: values of the cost (columns cost_values and cost_returns)."""
    reference: Reference | None = None
    checkpointed: Mapping[str, Checkpointed]
    """By folder name: actor, critic, cost_critic."""
