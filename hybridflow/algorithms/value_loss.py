"""The critic's loss."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.masking import keep


def clipped_value_loss(
    *,
    values: Float[Tensor, "b T"],
    old_values: Float[Tensor, "b T"],
    returns: Float[Tensor, "b T"],
    mask: Bool[Tensor, "b T"],
    cliprange: float,
) -> tuple[Float[Tensor, "b T"], Bool[Tensor, "b T"]]:
    """Half the larger squared error of the value and of the clipped value per token, and where the clip decided.

    ``1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)``: a value may not move further than ``c`` from the one
    it had when the batch was collected (PPO's reference implementation; arXiv:2005.12729 studies it).
    """
    values, old_values, returns = keep(values, mask), keep(old_values, mask), keep(returns, mask)
    clipped = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return 0.5 * torch.maximum(plain_error, clipped_error), (clipped_error > plain_error) & mask
