"""The recipe that turns an empty model into this rank's part of a parallel one, step by step in the needed order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.engines.train.mesh import Meshes
from hybridflow.engines.train.pipeline import cut_stage
from hybridflow.engines.train.recompute import checkpoint_layers
from hybridflow.engines.train.tensor_parallel import check_heads, tensor_parallel
from hybridflow.models.attention import attend_outside_graphs
from hybridflow.models.heads import PackedModel, ValueModel
from hybridflow.models.load import dtype_of
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError

ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")
"""Weights that vLLM's tensor parallelism cuts along their input dim."""


def refuse_unsupported(
    dims: ParallelDims,
    model: ModelConfig,
    sharding: FSDPConfig,
    *,
    device: str = "cpu",
    compiles: bool = False,
) -> None:
    """Raises ConfigError for what this engine does not do on ``device``, before anything is built.

    ``compiles`` says whether layers are to be compiled.
    """
    if compiles and not device.startswith("cuda"):
        # A process that also runs vLLM on a CPU has dynamo switched off: the key would silently do nothing there.
        raise ConfigError(f"use_torch_compile works on GPUs, and this is {device}: use use_torch_compile=False")
    if compiles and model.enable_gradient_checkpointing and model.gradient_checkpointing_mode == "selective":
        # The policy is a dispatch mode, and compiled code does not run under one.
        raise ConfigError(
            "model.gradient_checkpointing_mode=selective decides operation by operation, and use_torch_compile leaves "
            "none to be seen: use full, or use_torch_compile=False"
        )
    if dtype_of(sharding.mixed_precision.param_dtype) == torch.float16:
        raise ConfigError("mixed_precision.param_dtype=fp16 needs loss scaling, which is not supported: use bf16")
    if model.use_liger and not device.startswith("cuda"):
        raise ConfigError(f"model.use_liger: liger's kernels run on GPUs, and this is {device}: use use_liger=False")
    if model.use_liger and dims.tp > 1:
        raise ConfigError(
            f"model.use_liger: liger's kernels take no weights cut over tp {dims.tp}: use use_liger=False"
        )


def parallelize(
    model: PackedModel,
    meshes: Meshes,
    dims: ParallelDims,
    *,
    config: ModelConfig,
    sharding: FSDPConfig,
    device_type: str,
    row_parallel_shard_dim1: bool,
    compile_layers: bool = False,
) -> None:
    """Applies, in place: the pipeline cut, tensor and sequence parallelism, checkpointing, compilation, then sharding.

    FSDP comes last: it shards what tensor parallelism left on this rank, and gathers a checkpointed layer once more for
    its recomputation, together with its backward.
    """
    if dims.pp > 1:
        cut_stage(model, dims.coordinates(meshes.rank)["pp"], dims.pp)
    if dims.tp * dims.sp > 1:
        check_heads(model.net.config, dims.tp, dims.sp)
        model.token_multiple = dims.tp * dims.sp
    if meshes.tp is not None:
        tensor_parallel(model, meshes.tp)
    model.sequence_group = meshes.sp
    if config.enable_gradient_checkpointing:
        checkpoint_layers(model.net.base_model, config)
    if compile_layers:
        compile_blocks(model)
    if meshes.fsdp is not None:
        _shard(model, meshes, sharding, device_type, row_parallel_shard_dim1)


def compile_blocks(model: PackedModel, **options: Any) -> None:
    """Compiles every layer in place with sizes left open; ``options`` go to ``torch.compile``.

    Attention stays outside: it reads the segments' lengths, which differ in every micro-batch.
    """
    attend_outside_graphs()
    for block in model.blocks():
        block.compile(dynamic=True, **options)


def _shard(
    model: PackedModel, meshes: Meshes, sharding: FSDPConfig, device_type: str, row_parallel_shard_dim1: bool
) -> None:
    assert meshes.fsdp is not None
    offload = CPUOffloadPolicy(pin_memory=device_type == "cuda") if sharding.offload_policy else OffloadPolicy()
    shards = meshes.fsdp.size(meshes.fsdp.ndim - 1)
    placement = _Placement(model.hf_parameters(), shards) if row_parallel_shard_dim1 else None
    common: dict[str, Any] = {"mesh": meshes.fsdp, "shard_placement_fn": placement, "offload_policy": offload}
    policy = mixed_precision(sharding)
    blocks = model.blocks()
    reshard = reshards_after_forward(model, shards, sharding)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy, **common)
    if isinstance(model.net, ValueModel) and model.last:
        # Values are regressed: bf16 has three significant digits, too few for returns.
        whole = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        fully_shard(model.net.score, reshard_after_forward=False, mp_policy=whole, **common)
    # The root's own parameters are needed first in the backward pass: resharding them in between costs a gather.
    fully_shard(model, reshard_after_forward=False, mp_policy=policy, **common)
    if sharding.forward_prefetch:
        for block, following in pairwise(blocks):
            assert isinstance(block, FSDPModule) and isinstance(following, FSDPModule)
            block.set_modules_to_forward_prefetch([following])


def reshards_after_forward(model: PackedModel, shards: int, sharding: FSDPConfig) -> bool:
    """Whether layers are gathered once more for the backward pass (ZeRO-3).

    Not under a pipeline: several forwards run before a backward, and gathering for each would move the weights many
    times. Not on one rank: there is nothing to gather, only a cast to repeat.
    """
    return sharding.reshard_after_forward and shards > 1 and model.first and model.last


def mixed_precision(sharding: FSDPConfig) -> MixedPrecisionPolicy:
    """FSDP2's policy; dtypes equal to the master weights' are left out."""
    master = dtype_of(sharding.model_dtype)
    compute = dtype_of(sharding.mixed_precision.param_dtype)
    reduce = dtype_of(sharding.mixed_precision.reduce_dtype)
    return MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute, reduce_dtype=None if reduce == compute else reduce
    )


class _Placement:
    """Shard(1) for row-parallel weights whose second dim divides evenly, FSDP's own choice for the rest."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shards: int) -> None:
        self._second = {
            id(parameter)
            for name, parameter in parameters.items()
            if name.endswith(ROW_PARALLEL) and parameter.shape[1] % shards == 0
        }

    def __call__(self, parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if id(parameter) in self._second else None
