"""DTensor tensor parallelism of the dense decoder families, with sequence-parallel norms and a cut vocabulary.

Between layers a rank holds its slice of the tokens; attention and MLP gather them, work on their share of heads and
columns, and scatter the sums. Norm weights are DTensors on the same mesh, so one rule reduces every gradient.

LoRA adapters follow their layer, so that ``W x`` and ``B A x`` are cut alike:

    layer            W          A          A x                B          B A x
    column-parallel  rows       whole      whole              rows       own columns
    row-parallel     columns    columns    own tokens (sum)   whole      own tokens
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hybridflow.models.heads import PackedModel
from hybridflow.models.load import box_of, set_parameter, tied_names
from hybridflow.models.logprobs import VocabularyShard
from hybridflow.utils.errors import ConfigError

FAMILIES = frozenset({"qwen2", "qwen3", "llama", "mistral"})


def check_heads(config: object, tp: int, sp: int) -> None:
    """Raises ConfigError when the model's sizes cannot be cut ``tp`` x ``sp`` ways, with the arithmetic."""
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in FAMILIES:
        raise ConfigError(
            f"tensor parallel size {tp}, sequence parallel size {sp}: model type {kind!r} has no plan "
            f"(only {', '.join(sorted(FAMILIES))}); data parallelism works for it"
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads  # type: ignore[attr-defined]
    inner = config.intermediate_size  # type: ignore[attr-defined]
    if heads % (tp * sp):
        raise ConfigError(f"{heads} attention heads / (tp {tp} x sp {sp}) is no whole number")
    if kv_heads % tp:
        raise ConfigError(f"{kv_heads} key-value heads / tp {tp} is no whole number: choose tp up to {kv_heads}")
    if inner % tp:
        raise ConfigError(f"intermediate size {inner} / tp {tp} is no whole number")


def tensor_parallel(model: PackedModel, mesh: DeviceMesh) -> None:
    """Cuts the empty ``model`` over ``mesh`` in place; tied embeddings stay tied, and what is frozen stays frozen."""
    ties = tied_names(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    body = model.net.base_model
    for block in model.blocks():
        parallelize_module(block, mesh, _block_plan(block))
    plan: dict[str, ParallelStyle] = {}
    if isinstance(body.get_submodule("embed_tokens"), nn.Embedding):
        plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if any(True for _ in body.get_submodule("norm").parameters()):
        plan["norm"] = SequenceParallel()
    parallelize_module(body, mesh, plan)
    output = model.output_layer()
    if output is not None:
        name = next(name for name, module in model.net.named_modules() if module is output)
        parallelize_module(model.net, mesh, {name: ColwiseParallel()})
        rows = output.weight.shape[0]
        start = box_of(output.weight, output.weight.shape)[0][0]
        group = mesh.get_group()
        size = dist.get_world_size(group)
        assert rows >= size
        model.vocabulary_shard = VocabularyShard(start, group, largest=-(-rows // size))
    for name, others in ties.items():
        for other in others:
            set_parameter(model, other, model.get_parameter(name))
    for name in frozen:
        # SequenceParallel makes new parameters that all want a gradient.
        model.get_parameter(name).requires_grad_(False)


class _Replicated(ParallelStyle):
    """A layer whose weight is whole on every rank; its input already is a DTensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            whole = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        return module


def _with_adapters(plan: dict[str, ParallelStyle], names: set[str]) -> dict[str, ParallelStyle]:
    """``plan`` with the layers that carry adapters taken apart: base layer, A and B."""
    found: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        if f"{name}.base_layer" not in names:
            found[name] = style
            continue
        found[f"{name}.base_layer"] = style
        by_column = isinstance(style, ColwiseParallel)
        for half in ("lora_A", "lora_B"):
            (inner,) = (other for other in names if other.startswith(f"{name}.{half}."))
            if half == "lora_A":
                found[inner] = _Replicated() if by_column else RowwiseParallel(output_layouts=Shard(1))
            else:
                found[inner] = ColwiseParallel() if by_column else SequenceParallel(use_local_output=True)
    return found


def _block_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    names = {name for name, _ in block.named_modules()}
    for norm in ("self_attn.q_norm", "self_attn.k_norm"):
        if norm in names:
            # Norms of single heads: cut along the heads' dim, so that their weights' gradients are summed over ranks.
            plan[norm] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return _with_adapters(plan, names)
