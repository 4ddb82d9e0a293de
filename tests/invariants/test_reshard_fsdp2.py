"""Law: the blocks that the plan predicts are the ones that FSDP2 and DTensor really keep, values included.

A wrong shard order trains correctly and reshards garbage (``DeviceMesh(tensor(order))`` does exactly that), so every
local tensor is compared with the predicted box of the full parameter, on real processes.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybridflow.engines.train.base import Shard as Block
from hybridflow.hybrid_engine.boxes import full_box, volume, within
from hybridflow.hybrid_engine.layouts import ModelShapes, TrainingLayout, predict, training_table
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.hybrid_engine.rules import Heads, row_parallel, rule_for
from hybridflow.topology.parallel import ParallelDims
from tests.ranks import run_ranks
from tests.unit.hybrid_engine.cases import parts_of, wrong_parts

SIZES = {
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 54,
    "tie_word_embeddings": True,
}


def build_model():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def fsdp_mesh(layout: TrainingLayout):
    """The mesh of a layout, made of groups whose ranks keep their given order."""
    from torch.distributed.device_mesh import DeviceMesh

    dims, shards = layout.dims, layout.shards
    order = layout.shard_order or range(shards)
    rows = [[replica * shards + position for position in order] for replica in range(dims.dp_replicate)]
    shard_groups = [dist.new_group(row, sort_ranks=False) for row in rows]
    columns = [list(column) for column in zip(*rows, strict=True)]
    replica_groups = [dist.new_group(column, sort_ranks=False) for column in columns]
    rank = dist.get_rank()
    row = next(at for at, ranks in enumerate(rows) if rank in ranks)
    column = next(at for at, ranks in enumerate(columns) if rank in ranks)
    if dims.dp_replicate == 1:
        return DeviceMesh.from_group(shard_groups[0], "cpu", mesh=torch.tensor(rows[0]), mesh_dim_names=("shard",))
    return DeviceMesh.from_group(
        [replica_groups[column], shard_groups[row]],
        "cpu",
        mesh=torch.tensor(rows),
        mesh_dim_names=("replicate", "shard"),
    )


def shard_model(model, layout: TrainingLayout) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dims = layout.dims
    if dims.tp > 1:
        whole = init_device_mesh("cpu", (dims.dp_shard, dims.tp), mesh_dim_names=("shard", "tp"))
        column, row = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
        for layer in model.model.layers:
            for name, module in layer.named_modules():
                leaf = name.rpartition(".")[2]
                if leaf in column or leaf in row:
                    parallelize_module(module, whole["tp"], ColwiseParallel() if leaf in column else RowwiseParallel())
        parallelize_module(model.model.embed_tokens, whole["tp"], RowwiseParallel())
        model.lm_head.weight = model.model.embed_tokens.weight
        mesh = whole["shard"]
    else:
        mesh = fsdp_mesh(layout)
    names = {id(parameter): (name, parameter.shape) for name, parameter in model.named_parameters()}

    def placement(parameter):
        name, shape = names[id(parameter)]
        along_1 = layout.row_parallel_shard_dim1 and row_parallel(name) and shape[1] % layout.shards == 0
        return Shard(1 if along_1 else 0)

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)


LAYOUTS = {
    "FSDP": (TrainingLayout(dims=ParallelDims(dp_shard=4)), 2),
    "FSDP permuted, t=2": (TrainingLayout.permuted(ParallelDims(dp_shard=4), 2), 2),
    "FSDP permuted, t=4": (TrainingLayout.permuted(ParallelDims(dp_shard=4), 4), 4),
    "HSDP permuted": (TrainingLayout.permuted(ParallelDims(dp_replicate=2, dp_shard=2), 2), 2),
    "FSDP x TP": (TrainingLayout(dims=ParallelDims(dp_shard=2, tp=2)), 4),
}


def compare_and_publish(name: str) -> tuple[list[str], list[str], float]:
    layout, tp = LAYOUTS[name]
    rank, model = dist.get_rank(), build_model()
    full = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    shapes = {key: tuple(value.shape) for key, value in full.items()}
    described = ModelShapes(
        architecture="Qwen2ForCausalLM", shapes=shapes, heads=Heads(query=4, key_value=4, size=8), layers=2
    )
    shard_model(model, layout)
    local = {key: parameter.to_local().detach() for key, parameter in model.named_parameters()}
    wrong, blocks = [], []
    for key, shape in shapes.items():
        box = training_table(key, shape, layout, rule_for("Qwen2ForCausalLM", key))[rank]
        expected = full[key][within(box, full_box(shape))] if volume(box) else local[key].new_empty(0)
        if not torch.equal(local[key].reshape(expected.shape) if expected.numel() else local[key].flatten(), expected):
            wrong.append(f"{key}: {tuple(local[key].shape)} is not {box} of {shape}")
        blocks.append(Block(key, local[key], box or tuple((0, size) for size in local[key].shape), shape))
    generation = ParallelDims(dp_shard=4 // tp, tp=tp)
    slices = predict(described, layout, generation, dtype="float32", itemsize=4)
    parts = parts_of(slices, shapes, rank, torch.float32)
    told: list[int] = []
    metrics = Publisher(lambda: blocks, lambda: parts, told.append, bucket_bytes=4096, verify="always").publish(0)
    return wrong, wrong_parts(parts, full), metrics["publish/ratio_to_bound"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_predicted_blocks_are_what_fsdp2_keeps_and_publish_rebuilds_the_model(name):
    for wrong_blocks, wrong_slices, ratio in run_ranks(4, compare_and_publish, name):
        assert wrong_blocks == []
        assert wrong_slices == []
        assert ratio == 1.0
