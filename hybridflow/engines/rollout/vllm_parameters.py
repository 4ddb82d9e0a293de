"""Where a Hugging Face parameter lies in a vLLM model: every slice that this rank stores, as a writable view.

vLLM fuses q, k, v into ``qkv_proj`` and gate, up into ``gate_up_proj`` (each shard holds ``[q_r | k_r | v_r]``), cuts
column-parallel weights on dim 0 and row-parallel ones on dim 1, cuts the vocabulary after padding it to a multiple of
64, copies norms, and stacks the experts of a layer. With more ranks than key-value heads, a head is stored by several
ranks. All of it is read off the layers themselves; a layer that is not known here is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from hybridflow.engines.rollout.base import EngineParameters, Part
from hybridflow.utils.errors import EngineError

MARKS = 251
"""Values of a mark: few enough for 8 bits of mantissa, and prime, so that no usual slice length repeats them."""
MARK_STEP = 2.0**-12
"""Marks are as small as weights: an engine that is stepped with them does not overflow."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of the Hugging Face modules that a fused vLLM module holds, in its order."""


def engine_parameters(model: nn.Module) -> EngineParameters:
    """Parts of all parameters of a vLLM model on this rank; rows that only pad the vocabulary are set to zero.

    Raises:
        EngineError: for a parameter whose layout is not known, or that holds no plain weights.
    """
    parts: list[Part] = []
    engine_names: dict[str, str] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied: lm_head.weight is the embedding's own Parameter
                continue
            seen.add(id(parameter))
            name = f"{module_name}.{leaf}"
            if parameter.numel() == 0 or not parameter.is_floating_point():
                raise EngineError(
                    f"{name} ({type(module).__name__}) holds no plain weights, so slices cannot be written"
                )
            for part in _layout(name, module)(module_name, module, leaf, parameter.data):
                if engine_names.get(part.hf_name, name) != name:
                    raise EngineError(f"{part.hf_name} lies in both {engine_names[part.hf_name]} and {name}")
                parts.append(part)
                engine_names[part.hf_name] = name
    return EngineParameters(tuple(parts), engine_names)


def parts_in(parameters: EngineParameters, name: str, weight: Tensor) -> Iterator[tuple[Part, range]]:
    """Parts that lie in the engine's parameter ``name``, and which rows of its storage ``weight`` they are."""
    for part in parameters.parts:
        if parameters.engine_names[part.hf_name] == name:
            first = (part.view.data_ptr() - weight.data_ptr()) // (weight.stride(0) * weight.element_size())
            yield part, range(first, first + part.view.shape[0])


def check_names(parameters: EngineParameters, model_path: str) -> None:
    """Compares names and shapes with the Hugging Face architecture of the folder (built without memory).

    Raises:
        EngineError: names every missing, extra or mis-shaped parameter.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {part.hf_name: part.hf_shape for part in parameters.parts}
    problems = [f"vLLM stores no {name}" for name in expected.keys() - found.keys()]
    problems += [
        f"{parameters.engine_names[name]} holds {name}, which is not in the model"
        for name in found.keys() - expected.keys()
    ]
    problems += [
        f"{name} has shape {list(expected[name])}, but in vLLM {list(found[name])}"
        for name in found.keys() & expected.keys()
        if found[name] != expected[name]
    ]
    if problems:
        raise EngineError(f"vLLM's layout of {type(model).__name__} is not understood: {'; '.join(sorted(problems))}")


def check_loader(model: nn.Module, parameters: EngineParameters) -> None:
    """Compares where ``parameters`` says that every element lies with where vLLM's own loader puts it.

    Loads marks in place of weights, so it is for an engine whose weights are yet to be written; a rank alone calls it.

    Raises:
        EngineError: names every parameter whose elements lie elsewhere.
    """
    first = {part.hf_name: part for part in parameters.parts}
    salts = {name: at for at, name in enumerate(first)}
    whole = {name: tuple((0, length) for length in part.hf_shape) for name, part in first.items()}
    loader: Any = model
    with torch.no_grad():
        loader.load_weights((name, _marks(whole[name], salts[name], part.view)) for name, part in first.items())
    wrong = [
        f"{parameters.engine_names[part.hf_name]} does not hold {part.hf_name} {part.hf_box} where its layout says"
        for part in parameters.parts
        if not torch.equal(part.view, _marks(part.hf_box, salts[part.hf_name], part.view))
    ]
    if wrong:
        raise EngineError("vLLM's own loader puts weights elsewhere: " + "; ".join(wrong))


def _marks(box: Sequence[tuple[int, int]], salt: int, like: Tensor) -> Tensor:
    """A value for every element of ``box`` that depends on its place in the full parameter and on the parameter."""
    total = torch.full((1,) * len(box), salt % MARKS, dtype=torch.int16, device=like.device)
    for dim, (low, high) in enumerate(box):
        at = torch.arange(low, high, device=like.device)
        mixed = (at * (131, 17, 59)[dim] + at // MARKS * 37) % MARKS
        shape = [1] * len(box)
        shape[dim] = high - low
        total = (total + mixed.to(torch.int16).view(shape)) % MARKS
    return (total * MARK_STEP).to(like.dtype)


Layout = Callable[[str, Any, str, Tensor], Iterator[Part]]
"""Parts of one parameter: (module's name, module of the layout's kind, parameter's own name, its storage)."""


def _layout(name: str, module: nn.Module) -> Layout:
    for kind, layout in _LAYOUTS:
        if isinstance(module, kind):
            return layout
    raise EngineError(
        f"no layout is known for parameter {name} of module {type(module).__name__}; vLLM rollout supports "
        "Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Gemma models, unquantised"
    )


def _qkv(module_name: str, module: QKVParallelLinear, leaf: str, data: Tensor) -> Iterator[Part]:
    kv_rank = module.tp_rank // module.num_kv_head_replicas
    heads = (
        (module.num_heads, module.total_num_heads, module.tp_rank, module.head_size),
        (module.num_kv_heads, module.total_num_kv_heads, kv_rank, module.head_size),
        (module.num_kv_heads, module.total_num_kv_heads, kv_rank, module.v_head_size),
    )
    sizes = [(local * size, total * size, rank * local * size) for local, total, rank, size in heads]
    yield from _fused(module_name, leaf, data, sizes)


def _gate_up(module_name: str, module: MergedColumnParallelLinear, leaf: str, data: Tensor) -> Iterator[Part]:
    local = [size // module.tp_size for size in module.output_sizes]
    sizes = [(own, own * module.tp_size, own * module.tp_rank) for own in local]
    yield from _fused(module_name, leaf, data, sizes)


def _fused(module_name: str, leaf: str, data: Tensor, sizes: list[tuple[int, int, int]]) -> Iterator[Part]:
    """Parts of a fused module; ``sizes`` holds (local rows, rows in all, first row) of each."""
    prefix, _, fused_name = module_name.rpartition(".")
    names = FUSED.get(fused_name, ())
    if len(names) != len(sizes) or sum(size for size, _, _ in sizes) != data.shape[0]:
        raise EngineError(
            f"{module_name}.{leaf} is a fused layer of unknown make: {len(sizes)} pieces, {list(data.shape)}"
        )
    offset = 0
    for name, (local, total, start) in zip(names, sizes, strict=True):
        view = data.narrow(0, offset, local)
        yield _part(f"{prefix}.{name}.{leaf}", view, dim=0, start=start, total=total)
        offset += local


def _column(module_name: str, module: ColumnParallelLinear, leaf: str, data: Tensor) -> Iterator[Part]:
    start = module.tp_rank * data.shape[0]
    yield _part(f"{module_name}.{leaf}", data, dim=0, start=start, total=module.output_size)


def _row(module_name: str, module: RowParallelLinear, leaf: str, data: Tensor) -> Iterator[Part]:
    if leaf == "bias":
        yield from _replicated(module_name, module, leaf, data)
    else:
        start = module.tp_rank * data.shape[1]
        yield _part(f"{module_name}.{leaf}", data, dim=1, start=start, total=module.input_size)


def _vocabulary(module_name: str, module: VocabParallelEmbedding, leaf: str, data: Tensor) -> Iterator[Part]:
    shard = module.shard_indices
    rows = shard.org_vocab_end_index - shard.org_vocab_start_index
    data[rows:].zero_()
    view = data.narrow(0, 0, rows)
    yield _part(f"{module_name}.{leaf}", view, dim=0, start=shard.org_vocab_start_index, total=module.org_vocab_size)


def _experts(module_name: str, module: RoutedExperts, leaf: str, data: Tensor) -> Iterator[Part]:
    """``w13_weight`` is ``[experts, gate_r | up_r, d]``, ``w2_weight`` is ``[experts, d, n_r]``."""
    method: Any = module.quant_method
    config, backend = module.moe_config, method.unquantized_backend
    if backend not in (UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON) or config.ep_size > 1:
        raise EngineError(
            f"{module_name}.{leaf}: experts in the format of {backend} (expert parallel {config.ep_size}) cannot be "
            "written slice by slice; use moe_backend=triton and no expert parallelism"
        )
    prefix = module_name.removesuffix(".routed_experts")
    rank, tp, (experts, rows, width) = config.tp_rank, config.tp_size, data.shape
    if leaf == "w2_weight":
        box = ((0, experts), (0, rows), (rank * width, (rank + 1) * width))
        yield Part(f"{prefix}.down_proj", data, box, (experts, rows, width * tp))
        return
    if leaf != "w13_weight":
        raise EngineError(f"{module_name}.{leaf} is a parameter of experts whose layout is not known")
    inner, own = rows // 2 * tp, rows // 2
    for half in range(2):
        start = half * inner + rank * own
        box = ((0, experts), (start, start + own), (0, width))
        yield Part(f"{prefix}.gate_up_proj", data.narrow(1, half * own, own), box, (experts, 2 * inner, width))


def _replicated(module_name: str, module: nn.Module, leaf: str, data: Tensor) -> Iterator[Part]:
    del module
    yield _part(f"{module_name}.{leaf}", data, dim=0, start=0, total=data.shape[0])


def _part(hf_name: str, view: Tensor, *, dim: int, start: int, total: int) -> Part:
    """A part that is cut on one dim and whole on the others."""
    box = [(0, size) for size in view.shape]
    box[dim] = (start, start + view.shape[dim])
    shape = [*view.shape]
    shape[dim] = total
    return Part(hf_name, view, tuple(box), tuple(shape))


_LAYOUTS: tuple[tuple[type[nn.Module], Layout], ...] = (
    (QKVParallelLinear, _qkv),  # before its base class
    (MergedColumnParallelLinear, _gate_up),  # before its base class
    (ColumnParallelLinear, _column),
    (RowParallelLinear, _row),
    (VocabParallelEmbedding, _vocabulary),
    (ReplicatedLinear, _replicated),
    (RoutedExperts, _experts),
    (RMSNorm, _replicated),
    (GemmaRMSNorm, _replicated),
)
