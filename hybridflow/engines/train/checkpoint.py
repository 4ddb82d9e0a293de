"""Checkpoints of one role: torch.distributed.checkpoint for training state, safetensors for export.

Keys are flat: ``model/<name>``, ``optim/<state>/<name>`` with Hugging Face names, so that a checkpoint can be read at
any layout. What is in the optimizer's state is read from the checkpoint's own metadata: any torch optimizer works.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hybridflow.engines.train.random_state import random_state, read_random_state, set_random_state, write_random_state
from hybridflow.engines.train.shards import ShardWriter, agree, attempt, read, read_index
from hybridflow.models.weight_files import block_of, expert_pieces
from hybridflow.utils.errors import MachineError

logger = logging.getLogger(__name__)

ALL = ("model", "optimizer", "extra")
"""What a training checkpoint holds. ``extra``: the schedule's position and random streams."""
ABOUT = "engine.json"

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


class StateSave:
    """One save of a role's state into ``folder``: written here and now, or staged and written by a thread. Collective.

    Args:
        folder: of this role and step alone.
        parameters: what is trained, by Hugging Face name.
        optimizer: None where there is none.
        extra: further state of the engine (rank 0's is kept), plain JSON.
        contents: of ``ALL``, what is written.
        background: whether only a copy is made now; ``finish`` must then be called before the next save.

    Raises:
        MachineError: on every rank, when any rank cannot write.
    """

    def __init__(
        self,
        folder: str,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
        extra: Mapping[str, Any],
        *,
        contents: Sequence[str] = ALL,
        background: bool = False,
    ) -> None:
        state: dict[str, Tensor] = {}
        if "model" in contents:
            state |= {f"model/{name}": parameter.detach() for name, parameter in parameters.items()}
        if optimizer is not None and "optimizer" in contents:
            for name, parameter in parameters.items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    state[f"optim/{key}/{name}"] = value
        self._folder = Path(folder)
        self._about = {"contents": list(contents), **extra}
        self._random = random_state() if "extra" in contents else None
        self._writer = ShardWriter(folder, state, staged=background)
        self._thread = threading.Thread(target=self._writer.write, name="checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._writer.write()
            self.finish()

    @property
    def written(self) -> bool:
        """Whether this rank's file is written, or has failed."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Waits for this rank's file and completes the folder with the others. Collective.

        Raises:
            MachineError: on every rank, when any rank could not write.
        """
        if self._thread.ident is not None:
            self._thread.join()
        self._writer.finish(self._write_beside)

    def _write_beside(self) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self._random is not None:
            write_random_state(self._random, self._folder / f"rng_{rank}.pt")
        if rank == 0:
            (self._folder / ABOUT).write_text(json.dumps(self._about))


def load_state(
    folder: str,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    *,
    contents: Sequence[str] = ALL,
) -> Mapping[str, Any]:
    """Restores in place what ``contents`` names; the ``extra`` of the save. Collective.

    Random streams go on only where there are as many ranks as there were. Nothing is unpickled beyond tensors.

    Raises:
        MachineError: when the folder holds no checkpoint, lacks a parameter, or was saved without what is asked for.
    """
    about = Path(folder) / ABOUT
    if not about.exists():
        raise MachineError(f"{folder} holds no training checkpoint ({ABOUT} is missing)")
    extra = json.loads(about.read_text())
    if absent := sorted({*contents} - {*extra.get("contents", ALL)}):
        raise MachineError(
            f"checkpoint {folder} was saved without {', '.join(absent)}: leave that out of checkpoint.load_contents"
        )
    stored = read_index(folder)
    state: dict[str, Tensor] = {}
    if "model" in contents:
        state |= {f"model/{name}": parameter.detach() for name, parameter in parameters.items()}
    missing = [key for key in state if key not in stored]
    if missing:
        raise MachineError(f"checkpoint {folder} lacks {missing[0].removeprefix('model/')} ({len(missing)} in all)")
    restored: dict[str, dict[str, Tensor]] = {}
    if optimizer is not None and "optimizer" in contents:
        for key, meta in stored.items():
            kind, _, rest = key.partition("/")
            field, _, name = rest.partition("/")
            if kind != "optim" or name not in parameters:
                continue
            restored.setdefault(name, {})[field] = state[key] = _template(parameters[name], meta, key)
    read(folder, state)
    if optimizer is not None and "optimizer" in contents:
        optimizer.state.clear()
        for name, values in restored.items():
            optimizer.state[parameters[name]] = values
    if "extra" in contents:
        _restore_random(Path(folder))
    return extra


def _restore_random(folder: Path) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if len(list(folder.glob("rng_*.pt"))) == world:
        set_random_state(read_random_state(folder / f"rng_{rank}.pt"))
    else:
        logger.warning("%s was saved by another number of ranks: random streams start anew", folder)


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
    by_expert: frozenset[str],
    stages: dist.ProcessGroup | None,
    source: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a Hugging Face folder: safetensors in pieces, config, and the tokenizer files of ``source``. Collective.

    One tensor at a time is gathered; rank 0 holds one piece (4 GiB) at most. Parameters in ``by_expert`` are written
    expert by expert.

    Raises:
        MachineError: on every rank, when rank 0 cannot write.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    target = Path(folder)
    pieces = _Pieces(target)
    failed = attempt(lambda: target.mkdir(parents=True, exist_ok=True)) if rank == 0 else None
    for name in names:
        full = _whole(parameters.get(name), stages)
        if rank == 0 and failed is None:
            held = full.to("cpu", dtype or full.dtype, copy=True).contiguous()
            failed = attempt(partial(_add, pieces, name, held, one_by_one=name in by_expert))
    if rank == 0 and failed is None:
        failed = attempt(pieces.close)
    if rank == 0 and failed is None:
        failed = attempt(lambda: config.save_pretrained(target))
    if rank == 0 and failed is None:
        failed = attempt(lambda: _copy_beside(Path(source), target))
    agree(failed, folder)


def _add(pieces: _Pieces, name: str, held: Tensor, *, one_by_one: bool) -> None:
    """Adds a parameter, or its experts one by one."""
    if not one_by_one:
        pieces.add(name, held)
        return
    for piece in expert_pieces(name, held.shape):
        pieces.add(piece.stored, block_of(piece, held))


class _Pieces:
    """safetensors files of at most ``SHARD_BYTES`` in ``target``, named as ``from_pretrained`` looks for them."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._held: dict[str, Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._written: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + nbytes > SHARD_BYTES:
            self._write()
        self._held[name] = tensor
        self._held_bytes += nbytes
        self._total_bytes += nbytes

    def _write(self) -> None:
        save_file(self._held, self._path(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._target / f"piece-{number}.safetensors"

    def close(self) -> None:
        """Writes the last piece and gives all their final names."""
        self._write()
        if len(self._written) == 1:
            self._path(0).rename(self._target / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self._written):
            final = f"model-{number + 1:05d}-of-{len(self._written):05d}.safetensors"
            self._path(number).rename(self._target / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def save_adapters(
    folder: str,
    parameters: Mapping[str, Tensor],
    config: str,
    *,
    names: Sequence[str],
    stages: dist.ProcessGroup | None,
) -> None:
    """Writes a PEFT adapter folder. Collective.

    Raises:
        MachineError: on every rank, when rank 0 cannot write.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    whole = {f"base_model.model.{name}": _whole(parameters.get(name), stages) for name in names}

    def write() -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        held = {name: value.to("cpu", copy=True).contiguous() for name, value in whole.items()}
        save_file(held, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "adapter_config.json").write_text(config)

    agree(attempt(write) if rank == 0 else None, folder)


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


def _copy_beside(source: Path, target: Path) -> None:
    if not source.is_dir():
        return
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
