"""Safe-RLHF (arXiv:2310.12773): reward against cost, with a multiplier that is learned from whether the limit holds.

    A = (A_reward - lambda A_cost) / (1 + lambda)

Costs are credited by the same estimator as rewards, from values of their own where it needs values. They are neither
shaped nor reduced by a KL: the limit is in the unit in which the reward function states them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from hybridflow.algorithms.advantages import estimate, needs_of
from hybridflow.algorithms.covariance import selected_column
from hybridflow.algorithms.masking import masked_mean, masked_moments
from hybridflow.algorithms.policy_loss import COVARIANCE_LOSSES
from hybridflow.algorithms.rewards import place_scores
from hybridflow.batch.batch import Batch
from hybridflow.config.actor import PolicyLossConfig
from hybridflow.config.algorithm import AlgorithmConfig, SafeRLHFConfig

Metrics = dict[str, float]

_PASSED_BY_NAME = frozenset({"token_rewards", "mask", "group_id", "config", "values"})
_READS = ("cost", "loss_mask", "advantages", "group_id", "cost_values?", "correction_weights?")


def cost_reads(config: AlgorithmConfig, policy_loss: PolicyLossConfig | None = None) -> tuple[str, ...] | None:
    """Columns that ``assign_cost_credit`` reads (``name?``: where it is there); None: all, as in ``credit_reads``."""
    needs = needs_of(config.adv_estimator)
    if needs is None:
        return None
    selects = policy_loss is not None and policy_loss.loss_mode in COVARIANCE_LOSSES
    return (*_READS, *sorted((needs | {"old_log_probs"} if selects else needs) - _PASSED_BY_NAME))


class LagrangeMultiplier:
    """lambda >= 0, kept as its logarithm (arXiv:2310.12773, equation 31)."""

    LOG_LIMIT = 20.0
    """Bound of the logarithm: a first value of 0 (costs are only watched) means e^-20, which no step moves."""

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


def assign_cost_credit(
    batch: Batch, config: AlgorithmConfig, *, multiplier: float, policy_loss: PolicyLossConfig | None = None
) -> tuple[Batch, Metrics]:
    """``advantages`` of reward and cost in one, ``cost_returns`` where there are ``cost_values``, and metrics.

    Also ``covariance_selected`` for the ``policy_loss`` that reads it: by the advantages that are trained on.

    Reads cost, loss_mask, the advantages of the reward, and what the estimator asks for; a pure function over all rows
    of a step. Rows outside ``loss_mask`` count nowhere.

    Raises:
        ColumnError: a column that the configuration needs is missing.
    """
    mask, cost = batch["loss_mask"], batch["cost"]
    token_costs = place_scores(scores=cost.float(), mask=mask)
    others = {name: value for name, value in batch.columns().items() if name not in _PASSED_BY_NAME}
    if "cost_values" in batch:
        others["values"] = batch["cost_values"]
    advantages, returns = estimate(
        config.adv_estimator,
        token_rewards=token_costs,
        mask=mask,
        group_id=batch["group_id"],
        config=config,
        columns=others,
    )
    added = {
        "advantages": combine(reward_advantages=batch["advantages"], cost_advantages=advantages, multiplier=multiplier)
    }
    added |= selected_column(batch, added["advantages"], mask, policy_loss)
    present = mask.any(dim=1)
    picked = cost[present]
    metrics: Metrics = {"safe_rlhf/multiplier": multiplier, "safe_rlhf/cost_limit": config.safe_rlhf.cost_limit}
    if len(picked):
        over = (picked > config.safe_rlhf.cost_limit).double()
        metrics |= {
            "safe_rlhf/cost/mean": float(picked.mean()),
            "safe_rlhf/cost/max": float(picked.max()),
            "safe_rlhf/cost/min": float(picked.min()),
            "safe_rlhf/over_limit_share": float(over.mean()),
            "safe_rlhf/cost_advantages/mean": float(masked_mean(advantages.double(), mask)),
        }
    if "cost_values" in batch:
        added["cost_returns"] = returns
        _, total = masked_moments(returns, mask)
        _, left = masked_moments(returns - batch["cost_values"], mask)
        metrics["cost_critic/vf_explained_var"] = float(1 - left / (total + 1e-5))
    return Batch(added), metrics
