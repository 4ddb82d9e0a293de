"""How per-token losses become one number: a share that adds up over micro-batches and ranks.

Each function sums the rows it is given and divides by sizes of the *whole mini-batch* (``Counts``). So the parts of any
cut add to the value of the uncut batch, and no caller may divide again. Rows without a trained token count nowhere.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.contract import Counts
from hybridflow.algorithms.masking import masked_mean, masked_sum


@runtime_checkable
class Aggregation(Protocol):
    """Scalar share of a mini-batch's loss."""

    def __call__(
        self, *, losses: Float[Tensor, "b T"], mask: Bool[Tensor, "b T"], counts: Counts, scale: float
    ) -> Float[Tensor, ""]:
        """``scale`` is read by seq-mean-token-sum-norm alone."""
        ...


def token_mean(
    *, losses: Float[Tensor, "b T"], mask: Bool[Tensor, "b T"], counts: Counts, scale: float
) -> Float[Tensor, ""]:
    """Sum over tokens / tokens: every token weighs the same (DAPO, arXiv:2503.14476)."""
    return masked_sum(losses, mask) / max(counts.tokens, 1)


def token_sum(
    *, losses: Float[Tensor, "b T"], mask: Bool[Tensor, "b T"], counts: Counts, scale: float
) -> Float[Tensor, ""]:
    """Sum over tokens, undivided: the gradient grows with the batch."""
    return masked_sum(losses, mask)


def seq_mean_token_sum(
    *, losses: Float[Tensor, "b T"], mask: Bool[Tensor, "b T"], counts: Counts, scale: float
) -> Float[Tensor, ""]:
    """Sum within a row, mean over rows: the sequence log-likelihood form."""
    return masked_sum(losses, mask) / max(counts.sequences, 1)


def seq_mean_token_mean(
    *, losses: Float[Tensor, "b T"], mask: Bool[Tensor, "b T"], counts: Counts, scale: float
) -> Float[Tensor, ""]:
    """Mean within a row, mean over rows: every row weighs the same (GRPO, arXiv:2402.03300)."""
    return masked_mean(losses, mask, dim=1).sum() / max(counts.sequences, 1)


def seq_mean_token_sum_norm(
    *, losses: Float[Tensor, "b T"], mask: Bool[Tensor, "b T"], counts: Counts, scale: float
) -> Float[Tensor, ""]:
    """Sum within a row / constant ``scale``, mean over rows (Dr. GRPO, arXiv:2503.20783)."""
    return masked_sum(losses, mask) / (max(counts.sequences, 1) * scale)


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


def counts_of(mask: Bool[Tensor, "b T"]) -> Counts:
    """Sizes of one mini-batch that lies in one place."""
    return Counts(tokens=int(mask.sum()), sequences=int(mask.any(dim=1).sum()), rows=len(mask))
