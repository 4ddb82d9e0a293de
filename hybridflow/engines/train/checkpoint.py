"""Checkpoints of one role: torch.distributed.checkpoint for training state, safetensors for export.

Keys are flat: ``model/<name>``, ``optim/<state>/<name>`` with Hugging Face names, so that a checkpoint can be read at
any layout. What is in the optimizer's state is read from the checkpoint's own metadata: any torch optimizer works.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hybridflow.utils.errors import MachineError

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "*.py",
)
SHARD_BYTES = 4 << 30


def save_state(
    folder: str, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None, extra: Mapping[str, Any]
) -> None:
    """Writes parameters, optimizer state and ``extra`` (rank 0's) into ``folder``. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    state: dict[str, Tensor] = {f"model/{name}": parameter.detach() for name, parameter in parameters.items()}
    if optimizer is not None:
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"optim/{key}/{name}"] = value
    Path(folder).mkdir(parents=True, exist_ok=True)
    dcp.save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    torch.save(torch.get_rng_state(), Path(folder) / f"rng_{rank}.pt")
    if rank == 0:
        (Path(folder) / "engine.json").write_text(json.dumps(dict(extra)))
    _barrier()


def load_state(folder: str, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> Mapping[str, Any]:
    """Restores parameters, optimizer state and this rank's random state in place; the ``extra`` of ``save_state``.

    Raises:
        MachineError: when the folder holds no checkpoint, or lacks a parameter.
    """
    if not (Path(folder) / "engine.json").exists():
        raise MachineError(f"{folder} holds no training checkpoint (engine.json is missing)")
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {f"model/{name}": parameter.detach() for name, parameter in parameters.items()}
    missing = [key for key in state if key not in stored]
    if missing:
        raise MachineError(f"checkpoint {folder} lacks {missing[0].removeprefix('model/')} ({len(missing)} in all)")
    restored: dict[str, dict[str, Tensor]] = {}
    if optimizer is not None:
        for key, meta in stored.items():
            kind, _, rest = key.partition("/")
            field, _, name = rest.partition("/")
            if kind != "optim" or name not in parameters:
                continue
            restored.setdefault(name, {})[field] = state[key] = _template(parameters[name], meta, key)
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    if optimizer is not None:
        optimizer.state.clear()
        for name, values in restored.items():
            optimizer.state[parameters[name]] = values
    rank = dist.get_rank() if dist.is_initialized() else 0
    rng = Path(folder) / f"rng_{rank}.pt"
    if rng.exists():
        torch.set_rng_state(torch.load(rng, weights_only=True))
    return json.loads((Path(folder) / "engine.json").read_text())


def _template(parameter: nn.Parameter, meta: Any, key: str) -> Tensor:
    if not isinstance(meta, TensorStorageMetadata):
        raise MachineError(f"checkpoint entry {key} is no tensor: this optimizer's state cannot be restored")
    if tuple(meta.size) == tuple(parameter.shape) and parameter.ndim:
        return torch.zeros_like(parameter.detach(), dtype=meta.properties.dtype)
    return torch.zeros(tuple(meta.size), dtype=meta.properties.dtype)


def save_hf(
    folder: str,
    parameters: Mapping[str, Tensor],
    config: Any,
    *,
    names: Sequence[str],
    stages: dist.ProcessGroup | None,
    source: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a Hugging Face folder: safetensors in pieces, config, and the tokenizer files of ``source``. Collective.

    One tensor at a time is gathered; rank 0 holds one piece (4 GiB) at most.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    target = Path(folder)
    pieces: list[dict[str, Tensor]] = [{}]
    files: list[list[str]] = []
    size = total = 0
    if rank == 0:
        target.mkdir(parents=True, exist_ok=True)
    for name in names:
        full = _whole(parameters.get(name), stages)
        if rank != 0:
            continue
        full = full.to("cpu", dtype or full.dtype, copy=True).contiguous()
        nbytes = full.numel() * full.element_size()
        if pieces[0] and size + nbytes > SHARD_BYTES:
            files.append(_write_piece(target, len(files), pieces[0]))
            pieces[0], size = {}, 0
        pieces[0][name] = full
        size, total = size + nbytes, total + nbytes
    if rank == 0:
        files.append(_write_piece(target, len(files), pieces[0]))
        _name_pieces(target, files, total)
        config.save_pretrained(target)
        _copy_beside(Path(source), target)
    _barrier()


def with_local(parameter: Tensor, local: Tensor | None) -> Tensor:
    """A tensor placed like ``parameter`` whose block on this rank is ``local``; None: the parameter itself."""
    if local is None:
        return parameter
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def save_adapters(
    folder: str,
    parameters: Mapping[str, Tensor],
    config: str,
    *,
    names: Sequence[str],
    stages: dist.ProcessGroup | None,
) -> None:
    """Writes a PEFT adapter folder. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    whole = {f"base_model.model.{name}": _whole(parameters.get(name), stages) for name in names}
    if rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        held = {name: value.to("cpu", copy=True).contiguous() for name, value in whole.items()}
        save_file(held, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "adapter_config.json").write_text(config)
    _barrier()


def _whole(parameter: Tensor | None, stages: dist.ProcessGroup | None) -> Tensor:
    """The full parameter on every rank; only the pipeline stages that hold it pass one."""
    full = None
    if parameter is not None:
        held = parameter.detach()
        full = held.full_tensor() if isinstance(held, DTensor) else held
    if stages is None:
        assert full is not None
        return full
    kinds: list[Any] = [None] * dist.get_world_size(stages)
    dist.all_gather_object(
        kinds, None if full is None else (tuple(full.shape), full.dtype, str(full.device.type)), group=stages
    )
    owner = next(stage for stage, kind in enumerate(kinds) if kind is not None)
    shape, dtype, device = kinds[owner]
    full = torch.empty(shape, dtype=dtype, device=device) if full is None else full
    dist.broadcast(full, group=stages, group_src=owner)
    return full


def _write_piece(target: Path, number: int, piece: Mapping[str, Tensor]) -> list[str]:
    save_file(dict(piece), target / f"piece-{number}.safetensors", metadata={"format": "pt"})
    return list(piece)


def _name_pieces(target: Path, files: list[list[str]], total: int) -> None:
    if len(files) == 1:
        (target / "piece-0.safetensors").rename(target / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (target / f"piece-{number}.safetensors").rename(target / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _copy_beside(source: Path, target: Path) -> None:
    if not source.is_dir():
        return
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
