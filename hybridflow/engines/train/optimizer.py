"""Optimizer construction, the global gradient norm over mixed meshes, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridflow.config.model import OptimConfig
from hybridflow.engines.train.muon import MuonWithAdamW
from hybridflow.utils import optional
from hybridflow.utils.errors import ConfigError


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], optim: OptimConfig, *, in_layers: frozenset[str] = frozenset()
) -> torch.optim.Optimizer:
    """The optimizer that ``optim`` names over the trainable ``parameters``; norms and biases get no weight decay.

    ``in_layers`` names the parameters of the body's layers: their matrices are Muon's.

    Raises:
        ConfigError: for a negative rate, an unknown optimizer, or arguments that it does not take.
    """
    if optim.lr < 0:
        raise ConfigError(f"optim.lr={optim.lr}: a learning rate is 0 or more")
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not trained:
        raise ConfigError(
            "this rank's part of the model has nothing to train: with model.lora_rank every pipeline stage needs a "
            "layer that model.target_modules and exclude_modules give an adapter to; use fewer stages, or more targets"
        )
    if optim.optimizer == "Muon":
        matrices = {name: p for name, p in trained.items() if name in in_layers and p.ndim == 2}
        others = [parameter for name, parameter in trained.items() if name not in matrices]
        return MuonWithAdamW(matrices, _groups(others, optim.weight_decay), optim)
    groups = _groups(trained.values(), optim.weight_decay)
    arguments: dict[str, Any] = {"lr": optim.lr, **optim.override_optimizer_config}
    cls = torch.optim.AdamW
    if optim.optimizer == "AdamW":
        arguments = {"betas": tuple(optim.betas), "eps": optim.eps, "fused": True, **arguments}
    elif "." in optim.optimizer or ":" in optim.optimizer:
        cls = optional.load(optim.optimizer)
    else:
        raise ConfigError(
            f"optim.optimizer={optim.optimizer!r}: use AdamW, Muon, or the dotted path of an optimizer class"
        )
    try:
        built = cls(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optim.override_optimizer_config does not fit {optim.optimizer}: {error}") from error
    if optim.optimizer != "AdamW":
        _try(lambda held: cls(held, **arguments), next(iter(trained.values())), optim.optimizer)
    if optim.weight_decay and "weight_decay" not in built.defaults:
        raise ConfigError(f"optim.weight_decay={optim.weight_decay}: {optim.optimizer} decays no weights: use 0")
    return built


def _try(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], like: nn.Parameter, name: str) -> None:
    """One step of a user's optimizer on a few numbers cut as ``like`` is. Collective.

    Raises:
        ConfigError: when it fails, as optimizers do that mix rows and columns of a matrix, which no rank has whole.
    """
    local = torch.zeros(2, 2, dtype=like.dtype, device=like.device)
    cut = isinstance(like, DTensor)
    held = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False) if cut else local
    probe = nn.Parameter(held)
    probe.grad = torch.ones_like(held)
    try:
        build([probe]).step()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        where = "parameters that are cut over ranks" if cut else "dense gradients without a closure"
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"optim.optimizer={name} cannot step on {where}: use AdamW, Muon or another class. It said: {reason}"
        ) from error


def _groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups by decay and mesh: a fused step cannot take tensors of several meshes at once."""
    found: dict[tuple[bool, int], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = hash(parameter.device_mesh) if isinstance(parameter, DTensor) else 0
        found.setdefault((parameter.ndim < 2, mesh), []).append(parameter)
    return [
        {"params": held, "weight_decay": 0.0 if spared else weight_decay} for (spared, _), held in sorted(found.items())
    ]


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's blocks of all gradients that exist."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sums what tensor parallelism left unsummed (norm weights see only their rank's tokens). Collective."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def gradient_norm(parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of the whole gradient, a scalar equal on all ranks. Collective over every mesh in use.

    ``stages`` is the pipeline's group: its ranks hold different parameters.

    Blocks are grouped by the mesh axes they are cut along: norms and matrices may live on different meshes, and a block
    that several ranks hold (HSDP replicas) must count once.
    """
    groups: dict[tuple[str, ...], tuple[list[dist.ProcessGroup], list[Tensor]]] = {}
    device: torch.device | None = None
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        cut: list[dist.ProcessGroup] = []
        if isinstance(grad, DTensor):
            axes = [axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate()]
            cut = [grad.device_mesh.get_group(axis) for axis in axes]
            grad = grad.to_local()
        device = grad.device
        key = tuple(group.group_name for group in cut)
        groups.setdefault(key, (cut, []))[1].append(grad)
    total = torch.zeros((), device=device or torch.device("cpu"))
    for cut, blocks in groups.values():
        filled = [block for block in blocks if block.numel()]
        squares = torch.zeros((), device=total.device)
        if filled:
            squares = torch.stack(torch._foreach_norm(filled)).float().square().sum()
        for group in cut:
            dist.all_reduce(squares, group=group)
        total = total + squares
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, maximum: float) -> None:
    """Scales all gradients in place so that their norm ``norm`` becomes at most ``maximum``; 0 or less: never."""
    if maximum <= 0:
        return
    factor = torch.clamp(maximum / (norm + 1e-6), max=1.0)
    gradients = local_gradients(parameters)
    if gradients and float(factor) < 1.0:
        torch._foreach_mul_(gradients, float(factor))


def held_bytes(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes of this rank's blocks: parameters, gradients, optimizer state."""
    held = list(parameters)
    state = [] if optimizer is None else [value for entry in optimizer.state.values() for value in entry.values()]
    return {
        "parameters": _bytes(held),
        "gradients": _bytes(local_gradients(held)),
        "optimizer": _bytes(value for value in state if isinstance(value, Tensor)),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum((held.to_local() if isinstance(held, DTensor) else held).nbytes for held in tensors)
