"""Sums and scans of token rewards that the advantage estimators share; all of them look through masked positions."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.masking import keep

SCAN_COLUMNS = 64
"""Columns that a scan transposes at a time: bounds its float64 copies."""

Credit = tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]
"""(advantages, returns)."""


def outcome(token_rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum of a row's rewards over its trainable tokens, float64."""
    return keep(token_rewards, mask).sum(dim=1, dtype=torch.float64)


def spread_over_tokens(
    row_advantages: Float[Tensor, " B"], mask: Bool[Tensor, "B T"], like: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """A row's advantage on each of its trainable tokens, in the dtype of ``like``."""
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
    positions are never read. Computed in float64, results in the dtype of ``token_rewards``. ``values=None`` stands
    for 0: with ``lam=1`` both results are then the discounted rewards to go.
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


def rewards_to_go(
    *, token_rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], gamma: float
) -> Float[Tensor, "B T"]:
    """Discounted sum of the rewards from each trainable token on; the discount counts trainable tokens."""
    return generalized_advantages(token_rewards=token_rewards, values=None, mask=mask, gamma=gamma, lam=1.0)[0]
