"""Who scores a response (``reward.*``; verl's older ``reward_model.*`` and ``custom_reward_function.*`` land here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridflow.config.constraints import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    Within,
)
from hybridflow.config.data import CustomClassConfig
from hybridflow.config.model import FSDPConfig, ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunctionConfig(CustomClassConfig):
    """The user's reward function: ``def f(data_source, solution_str, ground_truth, extra_info) -> float | dict``."""

    name: str = "compute_score"
    """Name in the file."""
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of every call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongConfig(Section):
    """Soft penalty for responses that come near the length limit (DAPO)."""

    enable: bool = False
    """Whether it applies."""
    len: NonNegativeInt = 0
    """Tokens of the buffer before the limit in which the penalty grows."""
    penalty_factor: NonNegativeFloat = 1.0
    """Penalty at the limit."""
    log: bool = False
    """Whether the penalty is a metric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig(Section):
    """A trained reward model: a body with one linear output, read at the last token of a response."""

    enable: bool = False
    """Whether a reward model scores: in place of the scorers of data sources; beside a custom function, whose score is
    added."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Its folder, as transformers' sequence or token classification writes it, with the policy's tokenizer."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    tensor_parallel_size: PositiveInt = 1
    """Tensor-parallel ranks."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline stages."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ulysses ranks."""
    zero_stage: Annotated[int, Within(low=0, high=3)] | None = None
    """0 to 3; None: from ``fsdp_config``."""
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward; None: by token budget."""
    max_token_len_per_gpu: PositiveInt = 32768
    """Tokens of a micro-batch per device."""

    @property
    def sharding(self) -> FSDPConfig:
        """``fsdp_config`` as ``zero_stage`` wants it."""
        return self.fsdp_config.at_stage(self.zero_stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig(Section):
    """Reward functions, their deadline and what a failure means."""

    custom_reward_function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    """The user's own function; without one, the scorer of the row's data source."""
    num_workers: PositiveInt = 1
    """Processes that run reward functions."""
    timeout_s: PositiveFloat = 30.0
    """Deadline of one call; a later answer marks the sample invalid."""
    retries: NonNegativeInt = 0
    """How often a call that raised, was late or took its process with it is tried again."""
    max_failed_share: Share = 0.5
    """Share of failed samples in a step (scoring failed, generation was cut off) above which the run stops."""
    component_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of numbers that the reward function returns beside ``score``, of ``function`` (its score) and of
    ``reward_model``: their weighted sum is the score then. None given: the score is that of the function, plus the
    reward model's."""
    step_rewards: bool = False
    """Whether ``step_rewards``, a list of (characters, reward) pairs that the reward function returns beside ``score``,
    are placed on the tokens that end the first so many characters of the response."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Length penalty."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Trained reward model."""
