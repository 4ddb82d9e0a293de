"""From one score per response to a reward per token: shaping, placement, the KL term.

Shaping changes the score of a row before it is placed; the raw ``score`` column is never written to, so filters and
metrics go on reading what the reward function said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybridflow.algorithms.masking import keep, last_true
from hybridflow.config.algorithm import RewardShapingConfig
from hybridflow.config.reward import OverlongConfig
from hybridflow.utils.errors import ColumnError


class RewardNormalizer:
    """Running mean and standard deviation of scores over steps, as an exponential average with bias correction.

    Kept as moments about the running mean: a large mean costs the standard deviation no digits.
    """

    EPSILON = 1e-8

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._mean = 0.0
        self._variance = 0.0
        self._weight = 0.0

    @property
    def mean(self) -> float:
        """Running mean; 0 before the first update."""
        return self._mean

    @property
    def std(self) -> float:
        """Running standard deviation; 0 before the first update."""
        return math.sqrt(self._variance)

    def update(self, scores: Float[Tensor, " B"], present: Bool[Tensor, " B"]) -> None:
        """Takes the scores of present rows into account; no rows, no change."""
        picked = scores[present].double()
        if not len(picked):
            return
        self._weight = self._momentum * self._weight + 1 - self._momentum
        share = (1 - self._momentum) / self._weight
        mean = picked.mean()
        variance, shift = float((picked - mean).square().mean()), float(mean) - self._mean
        self._variance = (1 - share) * (self._variance + share * shift**2) + share * variance
        self._mean += share * shift

    def normalize(self, scores: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """``(scores - mean) / std``; only centred while the standard deviation is (almost) 0."""
        std = self.std
        return (scores - self.mean) / (std if std > self.EPSILON else 1.0)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"mean": self._mean, "variance": self._variance, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from a saved state."""
        self._mean, self._variance, self._weight = state["mean"], state["variance"], state["weight"]


def overlong_penalty(
    *, response_length: Int[Tensor, " B"], max_response_length: int, config: OverlongConfig
) -> Float[Tensor, " B"]:
    """Soft overlong punishment, in [-penalty_factor, 0] (DAPO, arXiv:2503.14476, equation 13).

    0 up to ``max_response_length - len`` tokens, then falling linearly to ``-penalty_factor`` at the limit.
    """
    if not config.enable or config.len <= 0:
        return torch.zeros(len(response_length), dtype=torch.float64, device=response_length.device)
    into_buffer = (response_length.double() - (max_response_length - config.len)) / config.len
    return -config.penalty_factor * into_buffer.clamp(0.0, 1.0)


def shape_scores(
    *,
    score: Float[Tensor, " B"],
    response_length: Int[Tensor, " B"],
    max_response_length: int,
    shaping: RewardShapingConfig,
    overlong: OverlongConfig,
    normalizer: RewardNormalizer | None,
) -> Float[Tensor, " B"]:
    """Shaped score, float64: normalised, then clipped, then minus the length penalties (in this order).

    Penalties come last so that they are worth the same whatever the scale of the scores.

    Raises:
        ValueError: normalisation is configured and no ``normalizer`` was given.
    """
    shaped = score.double()
    if shaping.normalize:
        if normalizer is None:
            raise ValueError("algorithm.reward_shaping.normalize=True needs a RewardNormalizer that lives over steps")
        shaped = normalizer.normalize(shaped)
    if shaping.clip is not None:
        shaped = shaped.clamp(-shaping.clip, shaping.clip)
    shaped = shaped - shaping.length_penalty * response_length.double()
    return shaped + overlong_penalty(
        response_length=response_length, max_response_length=max_response_length, config=overlong
    )


def place_scores(*, scores: Float[Tensor, " B"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Token rewards: a row's score on its last trainable token, 0 elsewhere; nothing for a row without one.

    The last *trainable* token, not the last token: a response may end in tool text, or in tokens that a rejection
    took out, and a reward placed there would be lost.
    """
    last, found = last_true(mask)
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    return rewards.scatter(1, last[:, None], keep(scores, found)[:, None]) if mask.shape[1] else rewards


def subtract_kl(
    *, token_rewards: Float[Tensor, "B T"], kl: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], kl_coef: float
) -> Float[Tensor, "B T"]:
    """``token_rewards - kl_coef * kl`` at trainable tokens, as a new tensor (Ziegler et al., arXiv:1909.08593)."""
    return keep(token_rewards, mask) - kl_coef * keep(kl, mask).to(token_rewards.dtype)


def reward_components(
    *, reward_info: Sequence[Mapping[str, Any]], keys: Sequence[str], scored: Bool[Tensor, " B"]
) -> Float[Tensor, "B K"]:
    """The named numbers of every row's ``reward_info``, float64; nan where a row has none (it then counts nowhere).

    Raises:
        ColumnError: of the rows that were ``scored`` none has a number of that name.
    """
    table = [[_number(info.get(key)) for key in keys] for info in reward_info]
    components = torch.tensor(table, dtype=torch.float64).reshape(len(reward_info), len(keys))
    for column, key in enumerate(keys):
        told = components[scored.cpu(), column]
        if len(told) and bool(told.isnan().all()):
            raise ColumnError(
                f"reward component {key!r} is in no row's reward_info: the reward function must return it"
            )
    return components


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
