"""Which tokens Clip-Cov and KL-Cov treat specially (arXiv:2505.22617).

The covariance of a token is ``(log pi - mean log pi)(A - mean A)``; a few tokens with a very large one cause most of an
entropy collapse. The paper selects within a mini-batch with the current policy. We select once per step with the old
policy over the whole batch, because a selection made inside the loss would depend on how the mini-batch was cut into
micro-batches and ranks. At the first mini-batch, and with one mini-batch per step, the covariances are the same.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.masking import keep, masked_moments
from hybridflow.algorithms.policy_loss import COVARIANCE_LOSSES
from hybridflow.batch.batch import Batch
from hybridflow.config.actor import PolicyLossConfig


def token_covariance(
    *, log_probs: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """``(log pi - mean)(A - mean)`` over trainable tokens, float64; 0 elsewhere."""
    log_probs, advantages = keep(log_probs.double(), mask), keep(advantages.double(), mask)
    centre, _ = masked_moments(log_probs, mask)
    level, _ = masked_moments(advantages, mask)
    return keep((log_probs - centre) * (advantages - level), mask)


def select_by_covariance(
    *,
    log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    config: PolicyLossConfig,
) -> Bool[Tensor, "B T"]:
    """Tokens that clip_cov detaches, or that carry the KL term of kl_cov.

    kl_cov: the ``kl_cov_ratio`` share of all tokens with the highest covariance. clip_cov: a pseudo-random
    ``clip_cov_ratio`` share, drawn from tokens whose covariance lies within [``clip_cov_lb``, ``clip_cov_ub``]; the
    draw depends on the token's numbers alone, so that it follows a row wherever it moves. At least one token.
    """
    covariance = token_covariance(log_probs=log_probs, advantages=advantages, mask=mask)
    key = _scatter_key(log_probs, advantages)
    if config.loss_mode == "kl_cov":
        return _highest(covariance, key, mask, _share(config.kl_cov_ratio, mask))
    candidates = mask & (covariance >= config.clip_cov_lb) & (covariance <= config.clip_cov_ub)
    return _highest(key, key, candidates, _share(config.clip_cov_ratio, mask))


def selected_column(
    batch: Batch, advantages: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], config: PolicyLossConfig | None
) -> dict[str, Tensor]:
    """``covariance_selected`` by the ``old_log_probs`` of ``batch``, for policy losses that read it; else nothing."""
    if config is None or config.loss_mode not in COVARIANCE_LOSSES:
        return {}
    old = batch["old_log_probs"]
    return {"covariance_selected": select_by_covariance(log_probs=old, advantages=advantages, mask=mask, config=config)}


def _share(ratio: float, mask: Tensor) -> int:
    return max(int(ratio * int(mask.sum())), 1)


def _highest(values: Tensor, key: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The ``count`` candidates of highest value; ``key`` decides between equal ones (all are when no A differs)."""
    count = min(count, int(candidates.sum()))
    if count == 0:
        return torch.zeros_like(candidates)
    lowest = values[candidates].topk(count).values[-1]
    above, level = candidates & (values > lowest), candidates & (values == lowest)
    last = key[level].topk(count - int(above.sum())).values[-1]
    return above | (level & (key >= last))


def _scatter_key(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """A number in [0, 1) that looks random: the low digits of a sine."""
    waves = torch.sin(log_probs.double() * 12.9898 + advantages.double() * 78.233) * 43758.5453
    return waves - waves.floor()
