"""From a Hugging Face folder to the parallel model that an engine trains: the order of steps, in one place.

    empty net -> head, adapters -> names and shapes -> TP, checkpointing, compile, FSDP -> memory -> weights

Shapes are taken before the model is cut, names after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.engines.train.mesh import Meshes
from hybridflow.engines.train.offload import offload_activations
from hybridflow.engines.train.parallelize import parallelize, reshards_after_forward
from hybridflow.engines.train.pipeline import Pipeline
from hybridflow.engines.train.torch_schedule import TorchSchedule
from hybridflow.engines.train.work import WorkMeter, architecture
from hybridflow.models.heads import Head, PackedModel, ValueModel, adapter_name, hf_name
from hybridflow.models.load import (
    Filled,
    dtype_of,
    empty_causal_lm,
    fill,
    local_of,
    materialise,
    persistent_buffers,
    tied_names,
)
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils import optional

LORA = "hybridflow.models.lora"
EMBEDDING = "model.embed_tokens.weight"
"""The parameter that may be tied to the output layer."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model of one rank with weights, and what is known of it."""

    model: PackedModel
    parameters: Mapping[str, nn.Parameter]
    """What this rank holds, by Hugging Face name."""
    shapes: Mapping[str, tuple[int, ...]]
    """Full shapes of this stage's parameters; adapters have their own."""
    buffers: Mapping[str, Tensor]
    """What belongs to the weights and is not trained, by Hugging Face name; whole on every rank."""
    adapter_shapes: Mapping[str, tuple[int, ...]]
    adapted: bool
    """Whether adapters are trained instead of the weights."""
    layer_names: frozenset[str]
    """Parameters of decoder layers."""
    tied_ends: bool
    """Whether the embedding is the output layer too."""
    by_expert: frozenset[str]
    """Parameters of stacked experts that the folder holds expert by expert."""
    meter: WorkMeter
    reshards: bool
    """Whether units give their weights back after the forward pass."""
    pipeline: Pipeline | None
    torch_schedule: TorchSchedule | None
    """What runs updates in place of ``pipeline``, where it was asked for."""


def assemble(
    config: ModelConfig,
    head: Head,
    *,
    sharding: FSDPConfig,
    dims: ParallelDims,
    where: Meshes,
    device: str,
    trains: bool,
    seed: int,
    vocab_limit: int | None,
    row_parallel_shard_dim1: bool,
    compile_layers: bool,
    pipeline_schedule: str,
) -> Assembled:
    """One rank's part of the model, filled with the folder's weights. Collective.

    Raises:
        MachineError: when the weights cannot be read.
    """
    model = _net(config, head, sharding, device, trains=trains, vocab_limit=vocab_limit)
    shapes, adapter_shapes = _shapes(model)
    aliases = {hf_name(name): tuple(hf_name(other) for other in others) for name, others in tied_names(model).items()}
    layer_names = model.layer_parameters()
    meter = _meter(model, head, shapes | adapter_shapes, layer_names, dims, device)
    parallelize(
        model,
        where,
        dims,
        config=config,
        sharding=sharding,
        device_type=device.partition(":")[0],
        row_parallel_shard_dim1=row_parallel_shard_dim1,
        compile_layers=compile_layers,
    )
    reshards = where.fsdp is not None and reshards_after_forward(model, where.fsdp.size(where.fsdp.ndim - 1), sharding)
    materialise(model, "cpu" if sharding.offload_policy else device)
    parameters = model.hf_parameters()
    buffers = {hf_name(name): buffer for name, buffer in persistent_buffers(model).items()}
    may_lack = _optional(shapes, head, trains=trains)
    filled = _fill(parameters, buffers, shapes, config, aliases=aliases, optional=may_lack)
    _fill_adapters(parameters, adapter_shapes, config, seed)
    schedule = pipeline_schedule if trains else "1f1b"
    pipeline, torch_schedule = _pipelines(model, schedule, where.pp, dims, sharding, device)
    return Assembled(
        model=model,
        parameters=parameters,
        shapes=shapes,
        buffers=buffers,
        adapter_shapes=adapter_shapes,
        adapted=bool(adapter_shapes),
        layer_names=layer_names,
        tied_ends=EMBEDDING in aliases,
        by_expert=filled.by_expert,
        meter=meter,
        reshards=reshards,
        pipeline=pipeline,
        torch_schedule=torch_schedule,
    )


def _fill(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    *,
    aliases: Mapping[str, tuple[str, ...]],
    optional: Iterable[str],
) -> Filled:
    """Reads the folder; an ``optional`` parameter that it lacks is zero, such a buffer stays as the model made it."""
    filled = fill(
        {name: parameter for name, parameter in parameters.items() if name in shapes} | dict(buffers),
        config.path,
        aliases=aliases,
        optional=[*optional, *buffers],
        shapes=dict(shapes) | {name: tuple(buffer.shape) for name, buffer in buffers.items()},
        trust_remote_code=config.trust_remote_code,
    )
    for name in filled.absent:
        if name in parameters:
            local_of(parameters[name].detach()).zero_()
    return filled


def _net(
    config: ModelConfig, head: Head, sharding: FSDPConfig, device: str, *, trains: bool, vocab_limit: int | None
) -> PackedModel:
    """The network without memory, and around it what packs rows; with adapters where they are trained."""
    net: Any = empty_causal_lm(
        config.path,
        dtype=dtype_of(sharding.model_dtype),
        trust_remote_code=config.trust_remote_code,
        override_config=config.override_config,
    )
    if config.use_liger:
        optional.load("hybridflow.models.liger:use_liger")(net)
    if head == "value":
        net = ValueModel(net)
    model = PackedModel(net, head)
    if vocab_limit is not None and vocab_limit < net.config.vocab_size:
        model.vocab_limit = vocab_limit
    model.requires_grad_(trains)
    if trains and config.enable_activation_offload:
        offload_activations(model, device)
    if trains and config.lora_rank > 0:
        optional.load(f"{LORA}:add_adapters")(model, config)
    return model


def _pipelines(
    model: PackedModel,
    schedule: str,
    stages: dist.ProcessGroup | None,
    dims: ParallelDims,
    sharding: FSDPConfig,
    device: str,
) -> tuple[Pipeline | None, TorchSchedule | None]:
    """What runs this rank's stage; None where there is a single one, and where torch's schedules were not asked for."""
    if stages is None:
        return None, None
    dtype = dtype_of(sharding.mixed_precision.param_dtype)
    own = None if schedule == "1f1b" else TorchSchedule(schedule, model, stages, dtype, device)
    return Pipeline(model, dims, stages, dtype, device), own


def _optional(shapes: Iterable[str], head: Head, *, trains: bool) -> list[str]:
    """Parameters that a folder may lack, and that are zero then: the head of a new critic, the bias of any value head.

    A value model that is not trained is a reward model, and one without a head would score everything 0.
    """
    of_head = [name for name in shapes if name.startswith("score.")] if head == "value" else []
    return of_head if trains else [name for name in of_head if name.endswith(".bias")]


def _shapes(model: PackedModel) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Full shapes of weights and of adapters, by Hugging Face name."""
    every = {name: tuple(parameter.shape) for name, parameter in model.hf_parameters().items()}
    adapters = {name: shape for name, shape in every.items() if adapter_name(name)}
    return {name: shape for name, shape in every.items() if name not in adapters}, adapters


def _meter(
    model: PackedModel,
    head: Head,
    shapes: Mapping[str, tuple[int, ...]],
    layer_names: frozenset[str],
    dims: ParallelDims,
    device: str,
) -> WorkMeter:
    trained = frozenset(name for name, held in model.hf_parameters().items() if held.requires_grad)
    columns = 1 if head == "value" else model.vocab_limit or model.net.config.vocab_size
    return WorkMeter(architecture(model.net.config, shapes, trained, layer_names, columns), dims, device)


def _fill_adapters(
    parameters: Mapping[str, nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    seed: int,
) -> None:
    if not shapes:
        return
    if config.lora_adapter_path is not None:
        optional.load(f"{LORA}:load_adapters")(parameters, shapes, config.lora_adapter_path)
    else:
        optional.load(f"{LORA}:start_adapters")(parameters, shapes, seed)
