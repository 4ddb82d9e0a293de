"""PPO-ptx (arXiv:2203.02155, equation 2): the loss of the model on text, added to the policy's.

    loss = policy loss - ptx_coef * mean over text tokens of log pi(token)

Rows of text stand among the rows of a mini-batch. Their ``loss_mask`` is False everywhere, so the policy loss and its
counts do not see them; ``ptx_weight`` is 1 / (text tokens of the mini-batch over all ranks) on their tokens and 0
elsewhere, so any split of the mini-batch adds up to the same loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hybridflow.algorithms.contract import Counts, Loss, Metric, Outputs
from hybridflow.algorithms.masking import keep, masked_sum
from hybridflow.batch.batch import Batch
from hybridflow.utils.errors import EngineError

WEIGHT = "ptx_weight"


class PretrainingMix:
    """A policy loss with the loss on text mixed in; reads ``ptx_weight``."""

    def __init__(self, loss: Loss, coef: float) -> None:
        self._loss = loss
        self._coef = coef
        self.needs = loss.needs | {"log_probs"}

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, Mapping[str, Metric]]:
        """A micro-batch's share of the loss, and its metrics."""
        loss, metrics = self._loss(outputs, rows, counts)
        if outputs.log_probs is None:
            raise EngineError("the loss on text needs log_probs and the engine's Outputs have none")
        weight, log_probs = rows[WEIGHT], outputs.log_probs.to(loss.dtype)
        text = weight > 0
        nats = -masked_sum(keep(log_probs, text) * weight, text)
        return loss + self._coef * nats, {**metrics, "actor/ptx_loss": Metric(nats.detach(), how="sum")}
