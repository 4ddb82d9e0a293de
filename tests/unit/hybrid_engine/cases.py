"""Tiny models as names and shapes, layouts, and both sides of a reshard as tensors: the workpieces of these tests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from hybridflow.engines.rollout.base import EngineParameters, Part
from hybridflow.engines.train.base import Shard
from hybridflow.hybrid_engine.boxes import Box, extents, full_box, volume, within
from hybridflow.hybrid_engine.layouts import ModelShapes, TrainingLayout
from hybridflow.hybrid_engine.plan import Slice
from hybridflow.hybrid_engine.rules import Heads
from hybridflow.topology.parallel import ParallelDims


def tiny_shapes(
    architecture: str = "Qwen2ForCausalLM",
    *,
    hidden: int = 32,
    inner: int = 40,
    heads: int = 8,
    kv_heads: int = 8,
    vocabulary: int = 64,
    layers: int = 2,
    bias: bool = False,
    tied: bool = False,
    norms: bool = False,
    experts: int = 0,
    one_by_one: bool = False,
    head_size: int = 4,
) -> ModelShapes:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for leaf, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{at}self_attn.{leaf}_proj.weight"] = (rows * head_size, hidden)
            if bias:
                shapes[f"{at}self_attn.{leaf}_proj.bias"] = (rows * head_size,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * head_size)
        if norms:
            shapes[f"{at}self_attn.q_norm.weight"] = shapes[f"{at}self_attn.k_norm.weight"] = (head_size,)
        if experts:
            shapes[f"{at}mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts if one_by_one else 0):
            for leaf in ("gate", "up"):
                shapes[f"{at}mlp.experts.{expert}.{leaf}_proj.weight"] = (inner, hidden)
            shapes[f"{at}mlp.experts.{expert}.down_proj.weight"] = (hidden, inner)
        if experts and not one_by_one:
            shapes[f"{at}mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
            shapes[f"{at}mlp.experts.down_proj"] = (experts, hidden, inner)
        if not experts:
            shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (inner, hidden)
            shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    heads_of = Heads(query=heads, key_value=kv_heads, size=head_size)
    return ModelShapes(architecture=architecture, shapes=shapes, heads=heads_of, layers=layers)


MODELS = {
    "untied": tiny_shapes("LlamaForCausalLM"),
    "tied, padded vocabulary": tiny_shapes(vocabulary=54, tied=True),
    "grouped-query, biased": tiny_shapes(kv_heads=2, bias=True),
    "query-key norms": tiny_shapes("Qwen3ForCausalLM", norms=True, kv_heads=4),
    "uneven": tiny_shapes(hidden=36, inner=20, vocabulary=54, bias=True),
    "experts": tiny_shapes("Qwen3MoeForCausalLM", norms=True, experts=4, inner=8),
    "experts, one by one": tiny_shapes("Qwen3MoeForCausalLM", norms=True, experts=4, inner=8, one_by_one=True),
}
_EXPERT = re.compile(r"(?P<prefix>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>gate|up|down)_proj\.weight")


def training_layouts(world: int, rollout_tp: int) -> list[TrainingLayout]:
    """FSDP, HSDP, FSDP x TP and their products over ``world`` ranks; permuted too where that exists."""
    degrees = [n for n in (1, 2, 4, 8) if n <= world]
    found = []
    for replicate, shard, tp in product(degrees, degrees, degrees):
        if replicate * shard * tp != world:
            continue
        dims = ParallelDims(dp_replicate=replicate, dp_shard=shard, tp=tp)
        found.append(TrainingLayout(dims=dims))
        if tp == 1 and shard % rollout_tp == 0 and rollout_tp > 1:
            found.append(TrainingLayout.permuted(dims, rollout_tp))
    return found


def full_weights(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """Random float32 values; every element of every parameter is different."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}


def shards_of(slices: Sequence[Slice], full: Mapping[str, Tensor], rank: int) -> list[Shard]:
    """The trainer's side of one rank; ranks that own nothing of a parameter have an empty block."""
    found = []
    for piece in slices:
        if piece.slot == 0:
            box = piece.owned[rank] or ((0, 0), *full_box(full[piece.name].shape)[1:])
            local = full[piece.name][within(box, full_box(full[piece.name].shape))].clone()
            found.append(Shard(piece.name, local, box, tuple(full[piece.name].shape)))
    return found


def parts_of(
    slices: Sequence[Slice], shapes: Mapping[str, Sequence[int]], rank: int, dtype: torch.dtype
) -> EngineParameters:
    """The generator's side of one rank, fused as vLLM fuses: qkv_proj, gate_up_proj, and experts in w13 and w2."""
    fused: dict[str, list[tuple[Slice, Box]]] = {}
    for piece in slices:
        box = piece.needed[rank]
        if box is not None:
            name = re.sub(r"\b(?:[qkv]_proj|gate_proj|up_proj)\b", "fused", piece.name)
            expert = _EXPERT.fullmatch(piece.name)
            if expert is not None:
                name = f"{expert['prefix']}.{'w2' if expert['leaf'] == 'down' else 'w13'}"
            fused.setdefault(name, []).append((piece, box))
    parts = []
    for name, members in fused.items():
        if name.endswith((".w13", ".w2")):
            parts += _stacked(members, shapes, dtype)
            continue
        dim = 1 if "experts" in name and len(members) > 1 else 0
        shape = list(extents(members[0][1]))
        shape[dim] = sum(extents(box)[dim] for _, box in members)
        storage = torch.full(shape, float("nan"), dtype=dtype)
        start = 0
        for piece, box in members:
            length = extents(box)[dim]
            parts.append(Part(piece.name, storage.narrow(dim, start, length), box, tuple(shapes[piece.name])))
            start += length
    return EngineParameters(tuple(parts))


def _stacked(
    members: Sequence[tuple[Slice, Box]], shapes: Mapping[str, Sequence[int]], dtype: torch.dtype
) -> list[Part]:
    """Views of one storage: ``w13`` is ``[experts, gate | up, d]``, ``w2`` is ``[experts, d, n]``."""
    found = [(_EXPERT.fullmatch(piece.name), piece, box) for piece, box in members]
    halves = 1 if any(match and match["leaf"] == "down" for match, _, _ in found) else 2
    rows, columns = extents(members[0][1])
    storage = torch.full((len(members) // halves, halves * rows, columns), float("nan"), dtype=dtype)
    parts = []
    for match, piece, box in found:
        assert match is not None
        start = rows if match["leaf"] == "up" else 0
        view = storage[int(match["expert"])].narrow(0, start, rows)
        parts.append(Part(piece.name, view, box, tuple(shapes[piece.name])))
    return parts


def wrong_parts(parts: EngineParameters, full: Mapping[str, Tensor]) -> list[str]:
    """Names of parts that do not hold, bit for bit, the cast slice of the full parameter."""
    wrong = []
    for part in parts.parts:
        expected = full[part.hf_name][within(part.hf_box, full_box(part.hf_shape))].to(part.view.dtype)
        if not torch.equal(part.view, expected):
            wrong.append(f"{part.hf_name} {part.hf_box}")
    return wrong


def held_bytes(parts: EngineParameters) -> int:
    """Bytes of a generator's storage."""
    return sum(volume(part.hf_box) * part.view.element_size() for part in parts.parts)
