"""Sums and scans of token rewards that the advantage estimators share; all of them look through masked positions."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.masking import keep, row_blocks

SCAN_ROWS = 4096
"""Rows that a scan works on at a time, as contiguous columns: bounds its copies, and long enough to be vectorised."""

Credit = tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]
"""(advantages, returns)."""


def outcome(token_rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum of a row's rewards over its trainable tokens, float64."""
    if not len(token_rewards):
        return token_rewards.new_zeros(0, dtype=torch.float64)
    return torch.cat([keep(part.double(), live).sum(dim=1) for part, live in row_blocks(token_rewards, mask)])


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
    advantages, returns = torch.empty_like(token_rewards), torch.empty_like(token_rewards)
    zero = token_rewards.new_zeros(())
    for start in range(0, len(token_rewards), SCAN_ROWS):
        rows = slice(start, start + SCAN_ROWS)
        live, to_go = mask[rows], token_rewards[rows].T.contiguous()
        gain = torch.empty_like(to_go)
        value = zero.expand_as(to_go) if values is None else values[rows].T.contiguous()
        _scan_back(to_go, gain, value, live.T.contiguous(), gamma, lam)
        torch.where(live, gain.T.contiguous(), zero, out=advantages[rows])
        torch.where(live, to_go.T.contiguous(), zero, out=returns[rows])
    return advantages, returns


def _scan_back(
    to_go: Float[Tensor, "T B"],
    gain: Float[Tensor, "T B"],
    value: Float[Tensor, "T B"],
    live: Bool[Tensor, "T B"],
    gamma: float,
    lam: float,
) -> None:
    """Writes returns over the rewards in ``to_go`` and advantages into ``gain``; numbers at masked places are garbage.

    One carried vector: what a token hands to the one before it, ``V + lam A``. A masked token hands on what it got.
    """
    beyond = to_go.new_zeros(to_go.shape[1], dtype=torch.float64)
    steps = zip(to_go.unbind(), gain.unbind(), value.unbind(), live.unbind(), strict=True)
    for rewards_then_returns, advantages, values, alive in reversed(list(steps)):
        target = torch.add(rewards_then_returns, beyond, alpha=gamma)
        advantage = target - values
        rewards_then_returns.copy_(target)
        advantages.copy_(advantage)
        beyond = torch.where(alive, torch.add(values, advantage, alpha=lam), beyond)


def rewards_to_go(
    *, token_rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], gamma: float
) -> Float[Tensor, "B T"]:
    """Discounted sum of the rewards from each trainable token on; the discount counts trainable tokens."""
    return generalized_advantages(token_rewards=token_rewards, values=None, mask=mask, gamma=gamma, lam=1.0)[0]
