"""Log-probabilities and entropy of chosen tokens without a full float32 logits tensor in the autograd graph.

With ``z = (h W^T + b) / temperature``, ``l = logsumexp z``, ``p = exp(z - l)``, target y:

    log-prob  = z_y - l                d/dz = onehot(y) - p
    entropy H = l - sum_v p_v z_v      d/dz = -p (log p + H)

Rows are worked off in blocks. Where all logits fit the memory target they are kept (as log p, the one tensor the
gradient needs) and the backward pass costs two matmuls as usual; beyond it they are computed again block by block.
Under tensor parallelism every rank holds a slice of the vocabulary and only ``[n]`` numbers are reduced.

A small vocabulary goes another way: logits that are little beside the states of the model are kept whole, log p comes
from torch's fused kernel and the head's gradient from autograd. What costs there is the number of small calls, not
memory. The number of columns alone decides, never that of rows: a row has the same bits in any micro-batch.

Embeddings often have more rows than the tokenizer has ids. Ids from ``vocab_limit`` on are never sampled and take no
part in the distribution: their logits are not computed, and their rows of the head get a gradient of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEEP_BYTES = 512 << 20
"""Kept log-probabilities of all rows may take this much; more is recomputed in the backward pass."""
BLOCK_BYTES = 32 << 20
"""float32 logits of one block of rows."""
SMALL_VOCABULARY = 1024
"""Up to this many columns logits are little: and ``log_softmax`` is as exact as logsumexp and a subtraction there."""
OUTER_COLUMNS = 8192
"""Columns of a head whose half-precision gradient is added to a float32 total in one go."""
BACKWARD_BLOCKS = 4
"""Blocks that the backward pass takes at once: each time it adds to the whole gradient of the head."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's slice of the vocabulary under tensor parallelism."""

    start: int
    """First token id of the slice."""
    group: dist.ProcessGroup
    """The ranks that hold the other slices."""
    largest: int
    """Rows of the largest slice. It decides the size of a block: ranks reduce block by block, equally often."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
    vocab_limit: int | None = None,
    keep_bytes: int = KEEP_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """float32 ``[n]`` log-probs of ``targets`` and (if asked) entropies, in nats, of the tempered distribution.

    Args:
        hidden: ``[n, D]``.
        weight: ``[V, D]`` of the head (under ``shard``: this rank's rows of it).
        targets: ``[n]`` token ids.
        bias: ``[V]`` or None.
        temperature: divides the logits, > 0.
        shard: this rank's slice of the vocabulary; ``hidden`` and ``targets`` are then equal on all its ranks.
        vocab_limit: ids from here on have probability 0; None: all ids of the head can be sampled.
        keep_bytes, block_bytes: memory targets (not of a small vocabulary), see the module.

    Raises:
        ValueError: when the temperature is not positive, or a target is beyond ``vocab_limit``.
    """
    if not temperature > 0:
        raise ValueError(f"log-probs of temperature {temperature} do not exist: it must be above 0")
    if vocab_limit is not None and targets.numel() and int(targets.max()) >= vocab_limit:
        raise ValueError(f"token {int(targets.max())} has probability 0: ids from {vocab_limit} on are never sampled")
    columns = sampled_columns(weight.shape[0], shard, vocab_limit)
    if shard is None and columns <= SMALL_VOCABULARY:
        if columns < weight.shape[0]:
            weight, bias = weight[:columns], None if bias is None else bias[:columns]
        return _of_small(tempered_logits(hidden, weight, bias, temperature), targets, entropy)
    grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep = grad and hidden.shape[0] * columns * 4 <= keep_bytes
    log_probs, entropies = _TokenLogProbs.apply(
        hidden, weight, bias, targets, temperature, entropy, shard, columns, keep, block_bytes
    )
    return log_probs, entropies if entropy else None


def _of_small(logits: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies from float32 logits of all rows."""
    if entropy:
        return _OfLogits.apply(logits, targets)
    return -torch.nn.functional.nll_loss(torch.log_softmax(logits, -1), targets, reduction="none"), None


class _OfLogits(torch.autograd.Function):
    """Log-probs and entropies of kept logits. Saves log p and p."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(logits, -1)
        p = log_p.exp()
        entropies = torch.mul(p, log_p).sum(-1).neg_()
        ctx.save_for_backward(targets, log_p, p, entropies)
        return _pick(log_p, targets, None), entropies

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor) -> tuple[Tensor, None]:
        targets, log_p, p, entropies = ctx.saved_tensors
        share = _share(log_p, grad_log_probs, grad_entropies, entropies).mul_(p)
        return share.scatter_add_(1, targets[:, None], grad_log_probs[:, None]), None


def sum_of_squares(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    shard: VocabularyShard | None = None,
    vocab_limit: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """float32 ``[n]`` sums of squared probabilities of the tempered distribution, without gradient.

    Arguments as of ``token_log_probs``.
    """
    columns = sampled_columns(weight.shape[0], shard, vocab_limit)
    head = weight[:columns], None if bias is None else bias[:columns]
    block = block_rows(hidden.shape[0], columns, shard, block_bytes)
    found = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    with torch.no_grad():
        for start in range(0, hidden.shape[0], block):
            part = slice(start, start + block)
            log_p, _ = log_softmax(hidden[part], *head, temperature, shard)
            found[part] = log_p.exp_().square_().sum(-1)
    if shard is not None:
        dist.all_reduce(found, group=shard.group)
    return found


def sampled_columns(rows: int, shard: VocabularyShard | None, vocab_limit: int | None) -> int:
    """Rows of this rank's head that belong to the distribution: always its first ones."""
    start = 0 if shard is None else shard.start
    return rows if vocab_limit is None else max(0, min(rows, vocab_limit - start))


def block_rows(n: int, columns: int, shard: VocabularyShard | None, block_bytes: int) -> int:
    """Rows of a block whose float32 logits take at most ``block_bytes``, at least 1; equal on ``shard``'s ranks."""
    widest = columns if shard is None else shard.largest
    return max(1, min(n, block_bytes // (4 * max(widest, 1)))) if n else 1


class HeadGradient:
    """Gradients of the head's input, weight and bias, summed over blocks of rows from those of the logits.

    Args:
        hidden, weight, bias: ``[n, D]``, ``[V, D]`` and ``[V]`` or None, of the forward pass.
        columns: the first rows of the weight that took part.
        of_weight: whether the weight and bias want theirs.
        one_block: whether all rows come at once: the sum then needs no float32, one product is rounded once in either.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: int, *, of_weight: bool, one_block: bool
    ) -> None:
        self._inputs = hidden, weight[:columns]
        self._dtypes = weight.dtype, None if bias is None else bias.dtype
        self._columns = columns
        summed = weight.dtype if one_block else torch.float32
        self._one_block = one_block
        self._hidden = torch.empty_like(hidden)
        self._weight = torch.zeros_like(weight, dtype=summed) if of_weight else None
        self._bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None

    def add(self, part: slice, grad: Tensor) -> None:
        """Adds what the logits' gradient ``[m, columns]`` of the rows ``part`` brings."""
        hidden, weight = self._inputs
        if self._bias is not None:
            self._bias[: self._columns] += grad.sum(0)
        grad = grad.to(hidden.dtype)
        torch.mm(grad, weight, out=self._hidden[part])
        if self._weight is None:
            return
        total = self._weight[: self._columns]
        if self._one_block:  # adding to a half-precision total would take a slower product
            torch.mm(grad.t(), hidden[part], out=total)
        else:
            _add_outer(total, grad, hidden[part])

    def whole(self, shard: VocabularyShard | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of hidden (summed over the vocabulary's slices), weight and bias, in the dtypes of what they belong to."""
        if shard is not None:
            dist.all_reduce(self._hidden, group=shard.group)
        of_weight, of_bias = self._dtypes
        weight = None if self._weight is None else self._weight.to(of_weight)
        return self._hidden, weight, None if self._bias is None else self._bias.to(of_bias)


class _TokenLogProbs(torch.autograd.Function):
    """The closed form. Saves hidden, weight, ``[n]`` numbers and, when it fits, log p."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        shard: VocabularyShard | None,
        columns: int,
        keep: bool,
        block_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        block = block_rows(n, columns, shard, block_bytes)
        kept = hidden.new_empty((n, columns), dtype=torch.float32) if keep else None
        head = weight[:columns], None if bias is None else bias[:columns]
        log_probs = hidden.new_empty(n, dtype=torch.float32)
        normaliser = torch.empty_like(log_probs)
        entropies = torch.zeros_like(log_probs)
        for start in range(0, n, block):
            part = slice(start, start + block)
            place = None if kept is None else kept[part]
            log_p, normaliser[part] = log_softmax(hidden[part], *head, temperature, shard, place)
            log_probs[part] = _pick(log_p, targets[part], shard)
            if entropy:
                entropies[part] = _entropy(log_p, shard)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropies, kept)
        ctx.settings = (temperature, entropy, shard, columns, block)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropies, kept = ctx.saved_tensors
        temperature, entropy, shard, columns, block = ctx.settings
        n = hidden.shape[0]
        head = weight[:columns], None if bias is None else bias[:columns]
        block = max(n, 1) if kept is not None else BACKWARD_BLOCKS * block
        gradient = HeadGradient(hidden, weight, bias, columns, of_weight=ctx.needs_input_grad[1], one_block=n <= block)
        for start in range(0, n, block):
            part = slice(start, start + block)
            if kept is not None:
                log_p = kept[part]
            else:
                log_p = tempered_logits(hidden[part], *head, temperature).sub_(normaliser[part, None])
            grad = _grad_logits(
                log_p,
                targets[part],
                grad_log_probs[part] / temperature,
                grad_entropies[part] / temperature if entropy else None,
                entropies[part],
                shard,
            )
            gradient.add(part, grad)
        return *gradient.whole(shard), None, None, None, None, None, None, None


def tempered_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, out: Tensor | None = None
) -> Tensor:
    """float32 tempered logits ``[m, V]``, in ``out`` or freshly allocated."""
    if out is not None and hidden.dtype == torch.float32:
        logits = torch.mm(hidden, weight.t(), out=out)
        logits = logits if bias is None else logits.add_(bias)
    else:
        product = torch.nn.functional.linear(hidden, weight, bias)
        logits = product.float() if out is None else out.copy_(product)
    return logits.div_(temperature) if temperature != 1.0 else logits


def log_softmax(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    shard: VocabularyShard | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """log p ``[m, V]`` (in ``out``, if given) and the normaliser ``[m]``."""
    logits = tempered_logits(hidden, weight, bias, temperature, out)
    normaliser = torch.logsumexp(logits, -1)
    if shard is not None:
        # logsumexp of the slices' logsumexps: shifted by the largest, so that nothing overflows.
        largest = normaliser.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
        total = torch.exp(normaliser - largest)
        dist.all_reduce(total, group=shard.group)
        normaliser = largest + total.log()
    return logits.sub_(normaliser[:, None]), normaliser


def _pick(log_p: Tensor, targets: Tensor, shard: VocabularyShard | None) -> Tensor:
    if shard is None:
        return log_p.gather(1, targets[:, None])[:, 0]
    if log_p.shape[1]:
        local, mine = _local_targets(log_p, targets, shard)
        picked = torch.where(mine, log_p.gather(1, local[:, None])[:, 0], 0.0)
    else:  # this rank holds nothing but ids beyond the tokenizer
        picked = log_p.new_zeros(targets.shape)
    dist.all_reduce(picked, group=shard.group)
    return picked


def _entropy(log_p: Tensor, shard: VocabularyShard | None) -> Tensor:
    p = log_p.exp()
    entropies = -p.mul_(log_p).sum(-1)
    if shard is not None:
        dist.all_reduce(entropies, group=shard.group)
    return entropies


def _local_targets(log_p: Tensor, targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    local = targets - shard.start
    mine = (local >= 0) & (local < log_p.shape[1])
    return local.clamp(0, log_p.shape[1] - 1), mine


def _grad_logits(
    log_p: Tensor,
    targets: Tensor,
    grad_log_probs: Tensor,
    grad_entropies: Tensor | None,
    entropies: Tensor,
    shard: VocabularyShard | None,
) -> Tensor:
    """Gradient by the logits ``[m, V]``, where those by log-prob and entropy are over the temperature already.

    ``log_p`` stays as it is.
    """
    grad = log_p.exp()
    if grad_entropies is None:
        grad.mul_(-grad_log_probs[:, None])
    else:
        grad.mul_(_share(log_p, grad_log_probs, grad_entropies, entropies))
    if shard is None:
        return grad.scatter_add_(1, targets[:, None], grad_log_probs[:, None].to(grad.dtype))
    if not log_p.shape[1]:
        return grad
    local, mine = _local_targets(log_p, targets, shard)
    return grad.scatter_add_(1, local[:, None], torch.where(mine, grad_log_probs, 0.0)[:, None].to(grad.dtype))


def _share(log_p: Tensor, grad_log_probs: Tensor, grad_entropies: Tensor, entropies: Tensor) -> Tensor:
    """``-g - g_H (log p + H)`` ``[m, V]``: the numbers of a row are taken together for one pass over the logits."""
    of_row = torch.addcmul(grad_log_probs, grad_entropies, entropies).neg_()
    return torch.addcmul(of_row[:, None], log_p, grad_entropies[:, None], value=-1)


def _add_outer(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """``total += grad^T hidden``, the sum in ``total``'s dtype."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), hidden)
        return
    # Slice by slice: the product of all columns, and its float32 copy, would take more than the total itself.
    for part, columns in zip(total.split(OUTER_COLUMNS), grad.split(OUTER_COLUMNS, dim=1), strict=True):
        part.add_(torch.mm(columns.t(), hidden))
