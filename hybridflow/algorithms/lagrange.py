"""The multiplier of Safe-RLHF: how much cost weighs against reward, learned from whether the cost limit holds."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from hybridflow.config.algorithm import SafeRLHFConfig


class LagrangeMultiplier:
    """lambda >= 0, kept as its logarithm (arXiv:2310.12773, equation 31)."""

    LOG_LIMIT = 20.0
    """Bound of the logarithm: a first value of 0 means e^-20, because a logarithm cannot start at 0."""

    def __init__(self, config: SafeRLHFConfig) -> None:
        self._log = math.log(max(config.multiplier_init, math.exp(-self.LOG_LIMIT)))
        self._limit = config.cost_limit
        self._lr = config.multiplier_lr

    @property
    def value(self) -> float:
        """lambda."""
        return math.exp(self._log)

    def update(self, *, mean_cost: float) -> None:
        """``log lambda += lr * lambda * (mean_cost - cost_limit)``; a non-finite cost is ignored."""
        if math.isfinite(mean_cost):
            step = self._lr * self.value * (mean_cost - self._limit)
            self._log = min(max(self._log + step, -self.LOG_LIMIT), self.LOG_LIMIT)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"log": self._log}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from a saved state."""
        self._log = float(state["log"])


def combine(
    *, reward_advantages: Float[Tensor, "B T"], cost_advantages: Float[Tensor, "B T"], multiplier: float
) -> Float[Tensor, "B T"]:
    """``(A_reward - lambda A_cost) / (1 + lambda)``: the scale stays whatever the multiplier is."""
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)
