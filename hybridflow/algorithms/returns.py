"""Sums and scans of token rewards that the advantage estimators share; all of them look through masked positions."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.masking import block_rows, keep, row_blocks

SCAN_TOKENS = 32
"""Tokens of a block of the scan: the sums within one cost that many multiplications a token."""

Credit = tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]
"""(advantages, returns)."""


def outcome(token_rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum of a row's rewards over its trainable tokens, float64."""
    if not len(token_rewards):
        return token_rewards.new_zeros(0, dtype=torch.float64)
    return torch.cat([keep(part, live).double().sum(dim=1) for part, live in row_blocks(token_rewards, mask)])


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
    size = block_rows(token_rewards)
    for start in range(0, len(token_rewards), size):
        rows = slice(start, start + size)
        live = mask[rows]
        rewards = keep(token_rewards[rows], live).double()
        held = None if values is None else keep(values[rows], live).double()
        front = _front(live)
        if front is not None:
            rewards = _move(rewards, live, front)
            held = None if held is None else _move(held, live, front)
        gain = _discounted_sums(_deltas(rewards, held, gamma), gamma * lam)
        to_go = gain if held is None else gain + held
        if front is not None:
            gain, to_go = _move(gain, front, live), _move(to_go, front, live)
        advantages[rows] = keep(gain, live)
        returns[rows] = keep(to_go, live)
    return advantages, returns


def _deltas(rewards: Tensor, values: Tensor | None, gamma: float) -> Tensor:
    """``r_t + gamma V_{t+1} - V_t``."""
    if values is None:
        return rewards
    delta = rewards - values
    delta[:, :-1].add_(values[:, 1:], alpha=gamma)
    return delta


def _front(live: Bool[Tensor, "b T"]) -> Bool[Tensor, "b T"] | None:
    """As many leading positions of each row as are live; None where no row has a gap and nothing need be moved."""
    if not bool(((live[:, 1:] & ~live[:, :-1]).sum(dim=1) + live[:, :1].any(dim=1) > 1).any()):
        return None
    return torch.arange(live.shape[1], device=live.device) < live.sum(dim=1, keepdim=True)


def _move(column: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The numbers at ``source`` put at ``target`` in order, 0 elsewhere; every row has equally many of both."""
    moved = torch.zeros_like(column)
    moved[target] = column[source]
    return moved


def _discounted_sums(gains: Float[Tensor, "b T"], factor: float) -> Float[Tensor, "b T"]:
    """``y_t = gains_t + factor y_{t+1}`` with y = 0 beyond the end, without a loop over tokens.

    Two matrix products: the sums within blocks of tokens, and what later blocks hand to each block.
    """
    if not gains.numel():
        return gains
    width, size = gains.shape[1], SCAN_TOKENS
    blocks = -(-width // size)
    cut = torch.nn.functional.pad(gains, (0, blocks * size - width)).view(-1, blocks, size)
    inside = cut @ _powers(size, factor, like=gains)
    # What block j gets from blocks k > j: the sum of their first tokens' sums, each faded over k - j - 1 blocks.
    beyond = inside[:, 1:, 0] @ _powers(blocks, factor**size, like=gains)[:-1]
    fade = factor ** torch.arange(size, 0, -1, dtype=gains.dtype, device=gains.device)
    return inside.addcmul_(beyond[:, :, None], fade).view(len(gains), -1)[:, :width]


def _powers(size: int, factor: float, *, like: Tensor) -> Tensor:
    """``[size, size]`` with ``factor ** (row - column)`` on and below the diagonal, 0 above it."""
    at = torch.arange(size, dtype=like.dtype, device=like.device)
    return torch.where(at[:, None] >= at, factor ** (at[:, None] - at).clamp(min=0), 0.0)


def rewards_to_go(
    *, token_rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], gamma: float
) -> Float[Tensor, "B T"]:
    """Discounted sum of the rewards from each trainable token on; the discount counts trainable tokens."""
    return generalized_advantages(token_rewards=token_rewards, values=None, mask=mask, gamma=gamma, lam=1.0)[0]
