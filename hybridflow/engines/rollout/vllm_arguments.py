"""What vLLM's engine is built with: the configuration's arguments, ours, the user's, and the model's limits."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.version import __version__ as vllm_version

from hybridflow.config.actor import RolloutConfig
from hybridflow.engines.rollout import vllm_cpu
from hybridflow.engines.rollout.inflight import DTYPES
from hybridflow.utils.errors import EngineError

VOCAB_LIMIT_KEY = "hybridflow_vocab_limit"
OURS = frozenset(
    {
        "model",
        "skip_tokenizer_init",
        "load_format",
        "quantization",
        "logprobs_mode",
        "generation_config",
        "async_scheduling",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "distributed_executor_backend",
        "enable_sleep_mode",
        "logits_processors",
        "speculative_config",
    }
)
"""Engine arguments that the user may not set: another value would give wrong numbers, or has its own key."""


class VocabLimit(LogitsProcessor):
    """Takes all mass from ids that the tokenizer does not have; one write per step for the whole batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """vLLM's signature; the limit comes with the engine's ``additional_config``."""
        del device, is_pin_memory
        self._limit = int(vllm_config.additional_config[VOCAB_LIMIT_KEY])

    def apply(self, logits: Tensor) -> Tensor:
        """Logits ``[b, V]`` with -inf from the limit on, in place."""
        logits[:, self._limit :] = float("-inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        """False: the most likely id may be one that is cut."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing: all rows have the same limit."""


def engine_arguments(
    model_path: str,
    hf_config: Any,
    config: RolloutConfig,
    options: dict[str, Any],
    *,
    max_model_len: int,
    tp: int,
    on_cpu: bool,
    seed: int,
    vocab_limit: int | None,
) -> dict[str, Any]:
    """Arguments of ``EngineArgs``; the user's ``options`` go last. Collective on CPU where there is a world.

    Raises:
        EngineError: for options that would give wrong numbers, and models that the backend has no kernel for.
    """
    arguments = _arguments(model_path, config, max_model_len, tp=tp, on_cpu=on_cpu, seed=seed)
    if on_cpu:
        vllm_cpu.check_head_dim(_head_dim(hf_config))
    if on_cpu and config.kv_cache_memory_bytes is None:
        arguments["kv_cache_memory_bytes"] = vllm_cpu.kv_cache_bytes(
            bytes_per_token=_kv_bytes_per_token(hf_config, tp, DTYPES[config.dtype]),
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
    if vocab_limit is not None and vocab_limit < hf_config.vocab_size:
        arguments["logits_processors"] = [VocabLimit]
        arguments["additional_config"] = {VOCAB_LIMIT_KEY: vocab_limit}
    return arguments | _user_arguments(options, on_cpu)


def check_environment(on_cpu: bool, gemm: str, tp: int) -> None:
    """Raises EngineError unless this process was started for an engine of this kind."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise EngineError(
            "VLLM_ENABLE_V1_MULTIPROCESSING must be 0 before vllm is imported, or its weights lie in another process; "
            "start the process with the variables of hybridflow.engines.rollout.environment"
        )
    if on_cpu:
        vllm_cpu.check_build(gemm)
    if tp > 1 and not dist.is_initialized():
        raise EngineError(f"tensor_model_parallel_size={tp} needs a torch.distributed world before the engine is built")


def _arguments(
    model_path: str, config: RolloutConfig, max_model_len: int, *, tp: int, on_cpu: bool, seed: int
) -> dict[str, Any]:
    chunked = config.enable_chunked_prefill and not on_cpu  # seeded requests crash there when a prefill is split
    arguments: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "dtype": DTYPES[config.dtype],
        "seed": seed,
        "load_format": "dummy",
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(
            config.max_num_batched_tokens, config.max_num_seqs, 0 if chunked else max_model_len
        ),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager or on_cpu,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "async_scheduling": False,
        "tensor_parallel_size": tp,
        "disable_log_stats": True,
        "enable_sleep_mode": config.free_cache_engine and not on_cpu,
    }
    if tp > 1 or (dist.is_initialized() and not on_cpu):  # on GPU also for tp=1: it takes the device from LOCAL_RANK
        arguments["distributed_executor_backend"] = "external_launcher"
    if on_cpu:
        arguments |= {"block_size": vllm_cpu.BLOCK_SIZE, "kv_cache_memory_bytes": config.kv_cache_memory_bytes}
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    return arguments


def _user_arguments(options: dict[str, Any], on_cpu: bool) -> dict[str, Any]:
    taken = sorted(OURS & options.keys())
    if taken:
        raise EngineError(f"rollout.engine_kwargs.vllm may not set {', '.join(taken)}: hybridflow does")
    unknown = sorted(options.keys() - EngineArgs.__dataclass_fields__.keys())
    if unknown:
        raise EngineError(f"rollout.engine_kwargs.vllm: vLLM {vllm_version} has no argument {', '.join(unknown)}")
    if options.get("enable_chunked_prefill") and on_cpu:
        raise EngineError("rollout.engine_kwargs.vllm.enable_chunked_prefill: seeded requests crash with it on CPU")
    return options


def _kv_bytes_per_token(hf_config: Any, tp: int, dtype: str) -> int:
    """Bytes of keys and values of one token on one rank, all layers."""
    heads = max(1, hf_config.num_key_value_heads // tp)
    return 2 * hf_config.num_hidden_layers * heads * _head_dim(hf_config) * getattr(torch, dtype).itemsize


def _head_dim(hf_config: Any) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
