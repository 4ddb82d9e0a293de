"""Baselines that differ from token to token within a group, weighted by the gradient energy of each sample so far.

    B_t = sum_i G_t^i W_t^i / sum_i W_t^i,      W_t = sum_{j <= t} |e_y - pi_j|^2 = sum_{j <= t} (1 - 2 pi_j(y) + S_j)

with rewards to go G, the sampled token's probability pi(y) and S = sum_v pi(v)^2 (arXiv:2602.07078: the squared norm of
the log-prob's gradient in the logits stands for that in the parameters, so only forward passes are needed).

Which tokens of a group's samples are compared: the t-th policy token of each (``optimal_token_baseline``), or the t-th
token of the k-th policy turn of each (``tir_optimal_token_baseline``: a tool reply aligns the samples anew).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybridflow.algorithms.masking import Groups, keep
from hybridflow.algorithms.returns import Credit, rewards_to_go
from hybridflow.config.algorithm import AlgorithmConfig

ENERGY_FLOOR = 1e-8
"""Added to every W, so that a group of certain tokens has the plain mean as its baseline."""


def gradient_energy(
    *,
    log_probs: Float[Tensor, "B T"],
    sum_pi_squared: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """``1 - 2 pi(y) + S`` per trainable token, in [0, 2], float64."""
    share = keep(log_probs.double(), mask).exp()
    # float32 columns: a certain token may come out a rounding below 0.
    return keep(1 - 2 * share + keep(sum_pi_squared.double(), mask), mask).clamp(min=0)


def policy_slots(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Number of policy tokens before each position."""
    return mask.long().cumsum(dim=1) - mask.long()


def turn_slots(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """``turn * T + position within the turn`` of each policy token; a turn is a run of trainable tokens."""
    before = torch.zeros_like(mask)
    before[:, 1:] = mask[:, :-1]
    starts = mask & ~before
    turn = starts.long().cumsum(dim=1)
    position = torch.arange(mask.shape[1], device=mask.device).expand_as(turn)
    start = torch.where(starts, position, 0).cummax(dim=1).values if mask.shape[1] else position
    return turn * mask.shape[1] + position - start


def slot_baseline(
    *,
    to_go: Float[Tensor, "B T"],
    weight: Float[Tensor, "B T"],
    slots: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_index: Int[Tensor, " B"],
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Weighted mean of ``to_go`` over a group's tokens of the same slot, and where there is one.

    Where a token has no sibling in its slot (it is longer than all others) the baseline of the row's last token that
    had one goes on; a token before which there was none has no baseline.
    """
    span = int(slots.max()) + 1 if slots.numel() else 1
    key = (group_index[:, None] * span + slots)[mask]
    _, place = torch.unique(key, return_inverse=True)
    cells = int(place.max()) + 1 if place.numel() else 0
    total = torch.zeros(cells, dtype=torch.float64, device=to_go.device)
    energy = total.index_add(0, place, weight[mask])
    payoff = total.index_add(0, place, (weight * to_go)[mask])
    count = total.index_add(0, place, torch.ones_like(weight[mask]))
    baseline, siblings = torch.zeros_like(weight), torch.zeros_like(mask)
    baseline[mask] = (payoff / energy)[place]
    siblings[mask] = (count > 1)[place]
    position = torch.arange(mask.shape[1], device=mask.device).expand_as(slots)
    last = torch.where(siblings, position, -1).cummax(dim=1).values if mask.shape[1] else position
    return baseline.gather(1, last.clamp(min=0)), (last >= 0) & mask


def _token_baseline(
    token_rewards: Tensor,
    mask: Tensor,
    group_id: Tensor,
    config: AlgorithmConfig,
    slots: Tensor,
    columns: dict[str, Any],
) -> Credit:
    energy = gradient_energy(
        log_probs=columns["old_log_probs"],
        sum_pi_squared=columns["old_sum_pi_squared"],
        mask=mask,
    )
    weights = columns.get("correction_weights")
    if weights is not None:
        # A row that counts w times in the gradient counts w^2 times in its variance.
        energy = energy * keep(weights.double(), mask).square()
    to_go = rewards_to_go(token_rewards=token_rewards.double(), mask=mask, gamma=config.gamma)
    groups = Groups.of(group_id, mask.any(dim=1))
    baseline, found = slot_baseline(
        to_go=to_go,
        weight=keep(energy.cumsum(dim=1) + ENERGY_FLOOR, mask),
        slots=slots,
        mask=mask,
        group_index=groups.index,
    )
    return keep(to_go - baseline, found).to(token_rewards.dtype), to_go.to(token_rewards.dtype)


def optimal_token_baseline(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """Rewards to go minus the energy-weighted mean over the group's tokens at the same count of policy tokens.

    Source: arXiv:2602.07078. Needs ``old_log_probs`` and ``old_sum_pi_squared``.
    """
    return _token_baseline(token_rewards, mask, group_id, config, policy_slots(mask), columns)


def tir_optimal_token_baseline(
    *,
    token_rewards: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    group_id: Int[Tensor, " B"],
    config: AlgorithmConfig,
    **columns: Any,
) -> Credit:
    """As ``optimal_token_baseline``, aligned by (policy turn, position within the turn); equal to it for one turn."""
    return _token_baseline(token_rewards, mask, group_id, config, turn_slots(mask), columns)
