"""LoRA through PEFT: adapters on linear layers, the base frozen. Imported only when ``model.lora_rank`` is above 0.

A layer computes ``W x + s B A x`` with ``s = alpha / r`` (rsLoRA: ``alpha / sqrt(r)``, arXiv:2312.03732). A starts
uniform, B zero (arXiv:2106.09685), so a new adapter changes nothing. Start values depend on the run seed and the
parameter's name alone: they are the same at every layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridflow.config.model import ModelConfig
from hybridflow.models.heads import PackedModel, adapter_name
from hybridflow.models.load import box_of, local_of
from hybridflow.utils.errors import ConfigError, MachineError

ADAPTER = "default"
PEFT_PREFIX = "base_model.model."


def add_adapters(model: PackedModel, config: ModelConfig) -> None:
    """Puts empty adapters on ``model`` in place and freezes everything but them (and a value head).

    Raises:
        ConfigError: when no layer matches ``model.target_modules``, or one that adapters cannot be put on.
    """
    targets: str | list[str] = (
        _all_linear(model)
        if config.target_modules == "all-linear"
        else config.target_modules
        if isinstance(config.target_modules, str)
        else list(config.target_modules)
    )
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        use_rslora=config.use_rslora,
        target_modules=targets,
        exclude_modules=config.exclude_modules,
        lora_dropout=0.0,
        bias="none",
    )
    model.requires_grad_(False)
    try:
        inject_adapter_in_model(settings, model.net, ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"model.target_modules={config.target_modules!r}: {error}") from error
    inside = {id(module) for block in model.blocks() for module in block.modules()}
    outside = sorted(name for name, layer in _layers(model).items() if id(layer) not in inside)
    if outside:
        raise ConfigError(
            f"model.target_modules={config.target_modules!r} puts adapters on {', '.join(outside)}: only linear layers "
            "inside the model's layers can have them (all-linear names those)"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(adapter_name(name) or name.startswith("net.score."))


def _all_linear(model: PackedModel) -> list[str]:
    """Leaf names of all linear layers inside the body's layers."""
    leaves = {
        name.rpartition(".")[2]
        for block in model.blocks()
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    }
    return sorted(leaves)


def start_adapters(parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """Fills this rank's blocks of new adapters: A uniform in +-1/sqrt(inputs), B zero."""
    for name, parameter in parameters.items():
        if not adapter_name(name):
            continue
        full = torch.zeros(shapes[name])
        if "lora_A" in name:
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            bound = shapes[name][1] ** -0.5
            full.uniform_(-bound, bound, generator=generator)
        _write(parameter, full)


def load_adapters(parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]], folder: str) -> None:
    """Fills this rank's blocks from an adapter folder in PEFT's layout.

    Raises:
        MachineError: when the folder lacks an adapter of the model, or holds another shape.
    """
    file = Path(folder) / "adapter_model.safetensors"
    if not file.exists():
        raise MachineError(f"model.lora_adapter_path: {folder} holds no adapter_model.safetensors")
    stored = load_file(file)
    for name, parameter in parameters.items():
        if not adapter_name(name):
            continue
        full = stored.get(PEFT_PREFIX + name)
        if full is None or tuple(full.shape) != shapes[name]:
            found = "nothing" if full is None else tuple(full.shape)
            raise MachineError(f"{file}: {PEFT_PREFIX}{name} is {found}, the model needs {shapes[name]}")
        _write(parameter, full)


def adapter_config(model: PackedModel, source: str) -> str:
    """``adapter_config.json`` of the model's adapters."""
    layer = next(layer for layer in _layers(model).values())
    rank = layer.r[ADAPTER]
    targets = sorted({name.rpartition(".")[2] for name in _layers(model)})
    return json.dumps(
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": source,
            "r": rank,
            "lora_alpha": layer.lora_alpha[ADAPTER],
            "use_rslora": abs(layer.scaling[ADAPTER] * rank - layer.lora_alpha[ADAPTER]) > 1e-9,
            "target_modules": targets,
            "lora_dropout": 0.0,
            "bias": "none",
        },
        indent=2,
    )


class AdaptersOff:
    """Context in which every adapter counts for nothing: the model is its frozen base, exactly."""

    def __init__(self, model: PackedModel) -> None:
        self._layers = list(_layers(model).values())
        self._scales = [layer.scaling[ADAPTER] for layer in self._layers]

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.scaling[ADAPTER] = 0.0

    def __exit__(self, *error: object) -> None:
        for layer, scale in zip(self._layers, self._scales, strict=True):
            layer.scaling[ADAPTER] = scale


def merged_blocks(model: PackedModel, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """This rank's blocks ``W + s B A`` of all adapted weights, by Hugging Face name. Collective."""
    found = {}
    for name, layer in _layers(model).items():
        weight = parameters[f"{name}.weight"]
        a, b = (_full(parameters[f"{name}.lora_{half}.weight"]) for half in "AB")
        rows, columns = box_of(weight, (b.shape[0], a.shape[1]))
        delta = b[rows[0] : rows[1]].float() @ a[:, columns[0] : columns[1]].float()
        found[f"{name}.weight"] = local_of(weight) + (layer.scaling[ADAPTER] * delta).to(weight.dtype)
    return found


def _layers(model: PackedModel) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.net.named_modules() if isinstance(module, LoraLayer)}


def _full(parameter: nn.Parameter) -> Tensor:
    held = parameter.detach()
    return held.full_tensor() if isinstance(held, DTensor) else held


def _write(parameter: nn.Parameter, full: Tensor) -> None:
    box = box_of(parameter, full.shape)
    local_of(parameter).copy_(full[tuple(slice(start, end) for start, end in box)])
