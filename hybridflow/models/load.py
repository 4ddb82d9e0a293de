"""Hugging Face models, built empty and filled tensor by tensor, so that host memory does not grow with ranks.

    empty_causal_lm   parameters on the meta device, buffers real (a later ``to_empty`` would lose the rotary ones)
    ...               the engine cuts, shards and parallelises the empty model
    materialise       storage for what is left on this rank; buffers and ties restored
    fill              rank 0 reads safetensors; every rank keeps the block that it owns

``load_causal_lm`` is the three in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hybridflow.models.attention import NAME as PACKED_ATTENTION
from hybridflow.models.weight_files import Box, ConvertedWeights, Piece, WeightFiles
from hybridflow.utils.errors import ConfigError, MachineError

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
AS_STORED = frozenset({"qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma", "gemma3_text"})
"""Model types whose folders name tensors as their modules do: one that is missing is missing."""
_DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype that a configuration calls ``name``."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def read_config(path: str, *, trust_remote_code: bool = False, override: Mapping[str, Any] | None = None) -> Any:
    """The model's Hugging Face config with ``override`` applied and dropout off.

    Raises:
        ConfigError: when an overridden field does not exist, or the weights are quantised.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{path} holds quantised weights: training, with LoRA too, needs plain ones (no QLoRA)")
    for name, value in (override or {}).items():
        if not hasattr(config, name):
            raise ConfigError(f"model.override_config.{name}: {type(config).__name__} has no such field")
        setattr(config, name, value)
    for name in _DROPOUTS:
        # Old and new log-probs of one policy must be equal: nothing may be random in a forward pass.
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    return config


def empty_causal_lm(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    attn: str = PACKED_ATTENTION,
) -> PreTrainedModel:
    """The causal language model of ``path`` with parameters on the meta device and real buffers.

    Raises:
        ConfigError: when the model cannot run with attention ``attn``.
    """
    config = read_config(path, trust_remote_code=trust_remote_code, override=override_config)
    return _empty(config, dtype, trust_remote_code, attn)


def _empty(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool, attn: str) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attn
        )
    if attn == PACKED_ATTENTION and not model._supports_attention_backend:
        raise ConfigError(f"{type(model).__name__} does not take registered attention functions: it cannot be packed")
    model.tie_weights()
    return model


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    attn: str = "sdpa",
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """A whole causal language model in this process, filled from the safetensors of ``path``.

    Raises:
        MachineError: when the folder has no safetensors, or they lack parameters of the model.
    """
    model = empty_causal_lm(
        path, dtype=dtype, trust_remote_code=trust_remote_code, override_config=override_config, attn=attn
    )
    materialise(model, device)
    buffers = persistent_buffers(model)
    fill(
        {**dict(model.named_parameters()), **buffers},
        path,
        aliases=tied_names(model),
        optional=buffers,
        trust_remote_code=trust_remote_code,
    )
    return model


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the weights (a router's balancing terms): they are stored, and nobody trains them."""
    parameters, stored = dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored and name not in parameters}


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For every parameter that has several names: its first name, and the others."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            found.setdefault(first[id(parameter)], []).append(name)
        else:
            first[id(parameter)] = name
    return {name: tuple(others) for name, others in found.items()}


def materialise(model: nn.Module, device: torch.device | str) -> None:
    """Gives every meta parameter uninitialised storage on ``device``; buffers keep their values, ties stay ties."""
    ties = tied_names(model)
    buffers = {name: buffer.to(device, copy=True) for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    for name, value in buffers.items():
        set_tensor(model, name, value)
    for name, others in ties.items():
        for other in others:
            set_parameter(model, other, model.get_parameter(name))


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts ``parameter`` in the slot ``name``."""
    module, _, leaf = name.rpartition(".")
    model.get_submodule(module).register_parameter(leaf, parameter)


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Puts ``value`` in the buffer slot ``name``."""
    module, _, leaf = name.rpartition(".")
    model.get_submodule(module)._buffers[leaf] = value


def box_of(parameter: Tensor, shape: Iterable[int]) -> Box:
    """The half-open range of every dim of the full parameter that this rank's ``parameter`` holds."""
    shape = tuple(shape)
    if not isinstance(parameter, DTensor):
        return tuple((0, size) for size in shape)
    local, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return tuple((start, start + size) for start, size in zip(offset, local, strict=True))


def local_of(parameter: Tensor) -> Tensor:
    """This rank's block of a parameter, without a gradient's path; shares its storage."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def placed_like(local: Tensor, like: Tensor) -> Tensor:
    """The tensor placed like ``like`` whose block on this rank is ``local``."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@dataclass(frozen=True, slots=True)
class Filled:
    """What a folder did not hold, and in which form it held the rest."""

    absent: tuple[str, ...] = ()
    """Optional parameters that no file holds."""
    by_expert: frozenset[str] = frozenset()
    """Parameters of stacked experts that the folder holds expert by expert."""


def fill(
    parameters: Mapping[str, Tensor],
    path: str,
    *,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    optional: Iterable[str] = (),
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    trust_remote_code: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Filled:
    """Copies the weights of ``path`` into this rank's blocks; says what of the names in ``optional`` was not there.

    Collective over ``group`` (None: the whole world, if there is one): its rank 0 reads, one stored tensor at a time,
    and every rank keeps its block. ``shapes`` names all parameters of the full model in an order that is equal on all
    ranks; a rank may lack some of them (pipeline stages). A folder whose tensors have other names than the module, or
    another form, is read as transformers reads it: whole, in the host memory of rank 0.

    Raises:
        MachineError: on every rank, when a file is missing, or lacks a parameter, or holds another shape.
    """
    shapes = shapes or {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    reader = world == 1 or dist.get_rank(group) == 0
    source, plan = None, None
    if reader:
        try:
            source, plan = _source(path, shapes, aliases or {}, frozenset(optional), trust_remote_code)
        except MachineError as error:
            plan = error
    if world > 1:
        shared = [plan]
        dist.broadcast_object_list(shared, group=group, group_src=0)
        plan = shared[0]
    if isinstance(plan, MachineError):
        raise plan
    assert plan is not None
    device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    for name, pieces in plan.items():
        for piece, dtype in pieces:
            if source is not None:
                stored = source.read(piece.stored).to(device)
            else:
                stored = torch.empty(piece.shape, dtype=dtype, device=device)
            if world > 1:
                dist.broadcast(stored, group=group, group_src=0)
            if name in parameters:
                _keep(parameters[name], shapes[name], piece, stored)
    return Filled(
        absent=tuple(name for name, pieces in plan.items() if not pieces),
        by_expert=frozenset(
            name for name, pieces in plan.items() if pieces and len(pieces[0][0].shape) < len(shapes[name])
        ),
    )


def _keep(parameter: Tensor, shape: tuple[int, ...], piece: Piece, stored: Tensor) -> None:
    """Copies what this rank owns of a stored tensor into its block."""
    own = box_of(parameter, shape)
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(own, piece.box, strict=True))
    if all(low < high for low, high in common):
        block = stored.view([high - low for low, high in piece.box])
        local_of(parameter)[_within(common, own)].copy_(block[_within(common, piece.box)])


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Index of ``inner`` in a tensor that stores ``outer``."""
    return tuple(slice(low - base, high - base) for (low, high), (base, _) in zip(inner, outer, strict=True))


Plan = dict[str, tuple[tuple[Piece, torch.dtype], ...]]
"""Stored tensors (none: not there, and need not be) and their dtypes by parameter."""


def _source(
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, tuple[str, ...]],
    optional: frozenset[str],
    trust_remote_code: bool,
) -> tuple[WeightFiles, Plan]:
    """What ``path`` is read with, and which of its tensors fill which parameter."""
    files = WeightFiles(path)
    try:
        return files, _plan(files, path, shapes, aliases, optional)
    except MachineError:
        if AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).model_type in AS_STORED:
            raise
    converted = ConvertedWeights(path, trust_remote_code=trust_remote_code)
    return converted, _plan(converted, path, shapes, aliases, optional)


def _plan(
    source: WeightFiles,
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, tuple[str, ...]],
    optional: frozenset[str],
) -> Plan:
    plan: Plan = {}
    for name, shape in shapes.items():
        pieces = source.pieces(name, shape, aliases.get(name, ()))
        plan[name] = tuple((piece, source.describe(piece.stored)[1]) for piece in pieces)
    missing = [name for name, pieces in plan.items() if not pieces and name not in optional]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise MachineError(f"{path}: no weights for {', '.join(missing[:5])}{more}")
    return plan
