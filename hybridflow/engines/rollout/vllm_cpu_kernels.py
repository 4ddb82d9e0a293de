"""Sampling and norms of vLLM's CPU build, done with fewer passes over memory; written against vLLM 0.32.

Its sampler draws 49,152 x 64 Gumbel variables, writes all log-probs, and ranks every sampled token: a tenth of a
generation step of SmolLM2. One softmax and one uniform number per row give the same distribution. Its norms run as
five PyTorch operations each although the build has a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy to vLLM."""
CHUNK = 256
"""Probabilities that are summed together before one of the sums is chosen."""
_MIX = (0x9E3779B97F4A7C15, 0x94D049BB133111EB, 0xBF58476D1CE4E5B9)
"""Odd 64-bit constants of SplitMix64 (Steele, Lea and Flood 2014)."""


def install(runner: Any) -> None:
    """Makes the sampler and the norms of one engine's model runner ours."""
    sampler: Any = runner.sampler
    sampler.sample = partial(_sample, runner.input_batch)
    sampler.gather_logprobs = _gather
    for module in runner.model.modules():
        if isinstance(module, RMSNorm) and module.has_weight and module.variance_size_override is None:
            replaced: Any = module
            replaced._forward_method = partial(_normalise, module, module._forward_method)


def uniforms(seeds: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Numbers ``[b]`` in [0, 1), a hash of request seed ``[b]`` and tokens so far ``[b]`` (prompt included).

    A position's draw is the same whether its sequence is sampled in one go or computed again after a cache was dropped.
    """
    with np.errstate(over="ignore"):
        mixed = seeds.astype(np.uint64) * np.uint64(_MIX[0]) + tokens.astype(np.uint64) * np.uint64(_MIX[1])
        for shift, factor in ((30, _MIX[2]), (27, _MIX[1])):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def draw(probabilities: Tensor, points: Tensor) -> Tensor:
    """Token ids ``[b]`` where the cumulative sum of ``probabilities`` ``[b, V]`` passes ``points`` ``[b]`` in [0, 1).

    Sums are taken by chunk and accumulated in float64: a token is drawn with its probability to 1e-6 of it, and never
    one of probability 0.
    """
    width = probabilities.shape[1]
    whole = width // CHUNK * CHUNK
    sums = probabilities[:, :whole].unflatten(1, (-1, CHUNK)).sum(-1, dtype=torch.float64)
    if whole < width:
        sums = torch.cat([sums, probabilities[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=1)
    ends = sums.cumsum(1)
    target = (points * ends[:, -1])[:, None]
    chunk = torch.searchsorted(ends, target, right=True)
    before = (ends.gather(1, chunk) - sums.gather(1, chunk)).clamp(min=0)
    ids = chunk * CHUNK + torch.arange(min(CHUNK, width))
    inside = torch.where(ids < width, probabilities.gather(1, ids.clamp(max=width - 1)), 0.0).double()
    place = torch.searchsorted(inside.cumsum(1), target - before, right=True)
    last = inside.shape[1] - 1 - (inside > 0).flip(1).int().argmax(1, keepdim=True)  # rounding may overrun the chunk
    return (chunk * CHUNK + torch.minimum(place, last))[:, 0]


def _sample(batch: Any, logits: Tensor, metadata: Any, logprobs_mode_override: Any = None) -> tuple[Tensor, Tensor]:
    """Token ids ``[b]`` and their log-probs ``[b, 1]`` in the distribution sampled from, for ``Sampler.sample``."""
    del logprobs_mode_override
    temperature = metadata.temperature
    if temperature is not None:
        logits = Sampler.apply_temperature(logits, temperature, metadata.all_random)
        for processor in metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
    logits = apply_top_k_top_p(logits, metadata.top_k, metadata.top_p)
    probabilities = functional.softmax(logits, dim=-1, dtype=torch.float32)
    if temperature is None:
        tokens = logits.argmax(-1)
    else:
        rows, generators = len(logits), metadata.generators
        seeds = np.zeros(rows, dtype=np.uint64)  # greedy rows have none: their draw is not used
        seeds[list(generators)] = [generator.initial_seed() for generator in generators.values()]
        tokens = draw(probabilities, torch.from_numpy(uniforms(seeds, batch.num_tokens_no_spec[:rows])))
        if not metadata.all_random:
            tokens = torch.where(temperature < GREEDY_BELOW, logits.argmax(-1), tokens)
    return tokens, probabilities.gather(1, tokens[:, None]).log()


def _gather(log_probs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """What ``Sampler.gather_logprobs`` gives for no further candidates; nobody asks for ranks."""
    assert num_logprobs == 0, "requests ask for the sampled token's log-prob only"
    return LogprobsTensors(token_ids[:, None].int(), log_probs, torch.zeros(len(token_ids), dtype=torch.int32))


def _normalise(
    module: RMSNorm, otherwise: Callable[..., Any], x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``RMSNorm.forward`` by the build's kernel where it takes the layout."""
    weight, epsilon = module.weight.data, module.variance_epsilon
    if not x.is_contiguous() or x.dtype != weight.dtype:
        return otherwise(x) if residual is None else otherwise(x, residual)
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
    return x, residual
