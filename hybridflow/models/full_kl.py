"""Exact KL(policy || reference) over the vocabulary at chosen positions, without a logits tensor of all rows.

With log p of the policy and log q of the reference, both of the tempered distribution,

    KL = sum_v p_v (log p_v - log q_v)          d/dz_v = p_v (log p_v - log q_v - KL)

for the policy's tempered logits z. Rows are worked off in blocks, forward and backward: what exists at a time are both
models' float32 logits of one block, computed again in the backward pass. Under tensor parallelism every rank holds the
same slice of both heads and only ``[n]`` numbers are reduced. Ids from ``vocab_limit`` on take no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.logprobs import (
    BLOCK_BYTES,
    HeadGradient,
    VocabularyShard,
    block_rows,
    log_softmax,
    sampled_columns,
    tempered_logits,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the reference brings: its states at the positions of the policy's, and its head. No gradient."""

    hidden: Tensor
    """``[n, D]``."""
    weight: Tensor
    """``[V, D]`` (under tensor parallelism this rank's rows)."""
    bias: Tensor | None


def full_kl(
    hidden: Tensor,
    weight: Tensor,
    reference: Reading,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    shard: VocabularyShard | None = None,
    vocab_limit: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """float32 ``[n]`` nats; arguments as in ``token_log_probs``. Collective over ``shard``'s ranks.

    Raises:
        ValueError: when the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"a KL at temperature {temperature} does not exist: it must be above 0")
    columns = sampled_columns(weight.shape[0], shard, vocab_limit)
    return _FullKL.apply(hidden, weight, bias, reference, temperature, shard, columns, block_bytes)


class _FullKL(torch.autograd.Function):
    """The closed form. Saves hidden, weight, what the reference brings and ``[n]`` numbers."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reference: Reading,
        temperature: float,
        shard: VocabularyShard | None,
        columns: int,
        block_bytes: int,
    ) -> Tensor:
        n = hidden.shape[0]
        block = block_rows(n, columns, shard, block_bytes)
        head, ref_head = _head(weight, bias, columns), _head(reference.weight, reference.bias, columns)
        kl = hidden.new_empty(n, dtype=torch.float32)
        normaliser, ref_normaliser = torch.empty_like(kl), torch.empty_like(kl)
        for start in range(0, n, block):
            part = slice(start, start + block)
            log_p, normaliser[part] = log_softmax(hidden[part], *head, temperature, shard)
            log_q, ref_normaliser[part] = log_softmax(reference.hidden[part], *ref_head, temperature, shard)
            kl[part] = (log_p.exp() * log_q.neg_().add_(log_p)).sum(-1)
        if shard is not None:
            dist.all_reduce(kl, group=shard.group)
        ctx.save_for_backward(
            hidden, weight, bias, reference.hidden, reference.weight, reference.bias, normaliser, ref_normaliser, kl
        )
        ctx.settings = (temperature, shard, columns, block)
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, normaliser, ref_normaliser, kl = ctx.saved_tensors
        temperature, shard, columns, block = ctx.settings
        head, ref_head = _head(weight, bias, columns), _head(ref_weight, ref_bias, columns)
        one_block = hidden.shape[0] <= block
        gradient = HeadGradient(hidden, weight, bias, columns, of_weight=ctx.needs_input_grad[1], one_block=one_block)
        for start in range(0, hidden.shape[0], block):
            part = slice(start, start + block)
            log_p = tempered_logits(hidden[part], *head, temperature).sub_(normaliser[part, None])
            log_q = tempered_logits(ref_hidden[part], *ref_head, temperature).sub_(ref_normaliser[part, None])
            share = log_q.neg_().add_(log_p).sub_(kl[part, None]).mul_(grad_kl[part, None] / temperature)
            gradient.add(part, share.mul_(log_p.exp_()))
        return *gradient.whole(shard), None, None, None, None, None


def _head(weight: Tensor, bias: Tensor | None, columns: int) -> tuple[Tensor, Tensor | None]:
    return weight[:columns], None if bias is None else bias[:columns]
