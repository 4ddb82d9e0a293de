"""Advantage estimators: from token rewards to what the policy gradient multiplies.

Every function takes ``token_rewards`` and ``mask`` (trainable tokens) of all rows of a step, the ``group_id`` of each
row, the configuration and all further columns by name; it returns ``(advantages, returns)``, 0 at masked positions, in
the dtype of ``token_rewards``. Common rules:

- A row without a trainable token (failed, rejected) is in no statistic.
- Rows of a group may stand anywhere; permuting rows permutes results.
- *Singleton rule*: where the baseline is made from the group, a row without a surviving sibling has advantage 0.
- A group whose scores are all equal has advantage exactly 0.
- Masked positions are transparent: a row's result is that of the row with these positions cut out.

A user's own function (``adv_estimator=package.module:function``) has this signature; what columns it needs beyond
those of every step may stand in its attribute ``needs``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybridflow.algorithms.masking import Groups, keep, masked_whiten
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing."""
SCAN_COLUMNS = 64
"""Columns that a scan transposes at a time: bounds its float64 copies."""

Credit = tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]


class Estimator(Protocol):
    """(advantages, returns)."""

    def __call__(
        self,
        *,
        token_rewards: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group_id: Int[Tensor, " B"],
        config: AlgorithmConfig,
        **columns: Any,
    ) -> Credit:
        """See the module docstring."""
        ...


def outcome(token_rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum of a row's rewards over its trainable tokens, float64."""
    return keep(token_rewards, mask).sum(dim=1, dtype=torch.float64)


def spread_over_tokens(
    row_advantages: Float[Tensor, " B"], mask: Bool[Tensor, "B T"], like: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """A row's advantage on each of its trainable tokens."""
    return torch.where(mask, row_advantages.to(like.dtype)[:, None], 0.0)


def generalized_advantages(
    *,
    token_rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"] | None,
    mask: Bool[Tensor, "B T"],
    gamma: float,
    lam: float,
) -> Credit:
    """Generalised advantages and returns (``advantage + value``), not whitened (arXiv:1506.02438, equation 16).

    ``A_t = delta_t + gamma lam A_next``, ``delta_t = r_t + gamma V_next - V_t``, where *next* is the next trainable
    token of the row and a row ends with its last one (V = A = 0 beyond: no bootstrap). Rewards and values at masked
    positions are never read. Computed in float64. ``values=None`` stands for 0: with ``lam=1`` both results are then
    the discounted rewards to go.
    """
    rows, width = token_rewards.shape
    advantages, returns = torch.empty_like(token_rewards), torch.empty_like(token_rewards)
    carry = token_rewards.new_zeros(rows, dtype=torch.float64)
    next_value = torch.zeros_like(carry)
    for stop in range(width, 0, -SCAN_COLUMNS):
        block = slice(max(stop - SCAN_COLUMNS, 0), stop)
        live = mask[:, block].T.contiguous()
        reward = keep(token_rewards[:, block].T.double(), live)
        value = torch.zeros_like(reward) if values is None else keep(values[:, block].T.double(), live)
        error = reward - value
        scanned = torch.empty_like(reward)
        for t in range(len(reward) - 1, -1, -1):
            found = error[t] + gamma * (next_value + lam * carry)
            carry = torch.where(live[t], found, carry)
            next_value = torch.where(live[t], value[t], next_value)
            scanned[t] = carry
        scanned = keep(scanned, live)
        advantages[:, block] = scanned.T.to(advantages.dtype)
        returns[:, block] = (scanned + value).T.to(returns.dtype)
    return advantages, returns


def gae(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    values: Float[Tensor, "B T"],
    **columns: Any,
) -> Credit:
    """Generalised advantages, whitened over all trainable tokens of the step; returns are left as they are.

    Sources: arXiv:1506.02438; whitening as in arXiv:2009.01325's code (unbiased variance). Needs ``values``.
    """
    advantages, returns = generalized_advantages(
        token_rewards=token_rewards, values=values, mask=mask, gamma=config.gamma, lam=config.lam
    )
    return masked_whiten(advantages, mask), returns


def grpo(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """Outcome minus the group's mean, over the group's unbiased standard deviation + 1e-6.

    Sources: GRPO arXiv:2402.03300; with ``norm_adv_by_std_in_grpo=False`` Dr. GRPO arXiv:2503.20783 (not divided).
    """
    groups = Groups.of(group_id, mask.any(dim=1))
    scores = outcome(token_rewards, mask)
    advantages = groups.centred(scores)
    if config.norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + STD_EPSILON)[groups.index]
    result = spread_over_tokens(advantages, mask, token_rewards)
    return result, result


ADVANTAGES: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
}
NEEDS: dict[str, frozenset[str]] = {
    "gae": frozenset({"values"}),
    "grpo": frozenset(),
}


def resolve(name: str) -> Estimator:
    """The registered estimator ``name`` or the user's own by dotted path.

    Raises:
        ConfigError: neither exists.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    if "." in name or ":" in name:
        return load(name)
    raise ConfigError(
        f"advantage estimator {name!r} is unknown: use one of {', '.join(ADVANTAGES)} or package.module:function"
    )


def needs_of(name: str) -> frozenset[str]:
    """Columns that estimator ``name`` needs beyond those of every step: what the dataflow must provide."""
    if name in NEEDS:
        return NEEDS[name]
    return frozenset(vars(resolve(name)).get("needs", ()))
