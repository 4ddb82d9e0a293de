"""Sampling in plain torch, for the reference engine: the distribution, then one draw per row from the row's generator.

The order is vLLM's: temperature, then top-k, then top-p over what top-k left; the kept part is renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from hybridflow.engines.rollout.base import SamplingParams

NEGATIVE_INFINITY = float("-inf")


def sampler_log_probs(logits: Tensor, settings: Sequence[SamplingParams], vocab_limit: int) -> Tensor:
    """Log-probs ``[b, V]`` (nats, float32) of the distribution that each row is sampled from.

    Ids from ``vocab_limit`` on, and those that top-k or top-p cut, are -inf. A greedy row (temperature 0) keeps its
    whole distribution at temperature 1.
    """
    logits = logits.float()
    if vocab_limit < logits.shape[-1]:
        logits = logits.clone()
        logits[:, vocab_limit:] = NEGATIVE_INFINITY
    temperatures = torch.tensor([one.temperature or 1.0 for one in settings], device=logits.device)
    logits = logits / temperatures[:, None]
    for row, one in enumerate(settings):
        if one.temperature > 0 and (one.top_k > 0 or one.top_p < 1):
            logits[row] = _truncate(logits[row], one.top_k, one.top_p)
    return torch.log_softmax(logits, dim=-1)


def _truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits ``[V]`` with everything but the top-k (ties kept), then the smallest set of mass >= top_p, at -inf."""
    if 0 < top_k < logits.numel():
        lowest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest, NEGATIVE_INFINITY)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(0, order, outside), NEGATIVE_INFINITY)
    return logits


def draw(log_probs: Tensor, settings: Sequence[SamplingParams], generators: Sequence[Generator]) -> Tensor:
    """One id per row ``[b]``: the most likely one where temperature is 0, else by one uniform number per row.

    A row uses its own generator only, so its tokens do not depend on which rows stand beside it.
    """
    ids = log_probs.argmax(dim=-1)
    rows = [row for row, one in enumerate(settings) if one.temperature > 0]
    if not rows:
        return ids
    uniform = torch.stack([torch.rand((), generator=generators[row], dtype=torch.float64) for row in rows])
    cumulative = log_probs[rows].double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(uniform.to(log_probs.device)[:, None] * total, below_total)
    ids[rows] = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
    return ids
