"""Sharded files in torch.distributed.checkpoint's format, written in three parts and read without trust.

    plan (collective) -> write (this rank's file; no collective, so a thread may do it) -> finish (collective)

``dcp.save`` does the three in one and ``dcp.async_save`` runs collectives in a thread beside the training's own; here
collectives stay on the thread that trains. A rank that cannot write says so in the next collective, and every rank
raises: none waits for one that has given up. The format's index is a pickle: it is read with an allow-list of classes.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from hybridflow.utils.errors import MachineError

logger = logging.getLogger(__name__)

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
        *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
    }
)
"""All that the index of a checkpoint is made of; none of it runs code of a file."""


class ShardWriter:
    """One save of ``state`` into ``folder``. Collective to build and to ``finish``.

    Args:
        folder: of this save alone.
        state: tensors by name; every rank passes its share of the same ones.
        staged: whether this rank's blocks are copied to host memory now, so that training may change them at once.

    Raises:
        MachineError: on every rank, when a rank cannot create the folder.
    """

    def __init__(self, folder: str, state: Mapping[str, Tensor], *, staged: bool) -> None:
        self._folder = folder
        self._planner = _Planner()
        self._writer = FileSystemWriter(folder)
        self._results: list[WriteResult] = []
        self._error: str | None = None
        self._plan, self._metadata = self._agreed_plan(dict(state))
        if staged:
            self._planner.stage(self._plan)

    def _agreed_plan(self, state: dict[str, Any]) -> tuple[SavePlan, Metadata | None]:
        coordinator = _rank() == 0
        self._planner.set_up_planner(state, self._writer.storage_meta(), coordinator)
        local: SavePlan | None = None
        try:
            self._writer.set_up_storage_writer(coordinator)
            local = self._writer.prepare_local_plan(self._planner.create_local_plan())
        except OSError as error:
            self._error = _text(error)
        agree(self._error, self._folder)
        plans = _gathered(local)
        chosen, metadata = None, None
        if coordinator:
            chosen, metadata = self._planner.create_global_plan(plans)
            chosen = self._writer.prepare_global_plan(chosen)
        return self._planner.finish_plan(_scattered(chosen)), metadata

    def write(self) -> None:
        """Writes this rank's file; a failure of any kind waits for ``finish``. Runs in any thread."""
        try:
            with _without_zip_checksums():
                self._results = self._writer.write_data(self._plan, self._planner).wait()
        except Exception as error:  # the end of a thread: ``finish`` raises it on every rank
            if not isinstance(error, (OSError, RuntimeError)):  # as a disk fails; torch's zip writer by RuntimeError
                logger.exception("writing %s failed", self._folder)
            self._error = _text(error)

    def finish(self, beside: Callable[[], None]) -> None:
        """Writes the index once every rank has written; ``beside`` writes this rank's further files. Collective.

        Raises:
            MachineError: on every rank, when any rank failed; says which and why.
        """
        if self._error is None:
            self._error = attempt(beside)
        agree(self._error, self._folder)
        results = _gathered(self._results)
        if self._metadata is not None:
            metadata = self._metadata
            self._error = attempt(lambda: self._writer.finish(metadata, results))
        agree(self._error, self._folder)


def read_index(folder: str) -> Mapping[str, Any]:
    """What the checkpoint in ``folder`` holds, by name.

    Raises:
        MachineError: the index is damaged, or asks for classes that no checkpoint needs.
    """
    return _Reader(folder).read_metadata().state_dict_metadata


def read(folder: str, state: dict[str, Tensor]) -> None:
    """Fills the tensors of ``state`` in place; the folder may have been written at any layout. Collective.

    Raises:
        MachineError: an entry is no tensor, or see ``read_index``.
    """
    index = read_index(folder)
    for name in state:
        if not isinstance(index[name], TensorStorageMetadata):
            raise MachineError(f"checkpoint entry {name} of {folder} is no tensor: it is not read")
    reader = _Reader(folder)
    dcp.load(dict(state), storage_reader=reader, planner=_TensorsOnly(), no_dist=not dist.is_initialized())


def agree(error: str | None, folder: str) -> None:
    """Raises on every rank when any rank brings an error. Collective.

    Raises:
        MachineError: names the ranks and what went wrong there.
    """
    errors = _everyones(error)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
    if found:
        raise MachineError(f"{folder} cannot be written ({'; '.join(found)})")


def attempt(action: Callable[[], Any]) -> str | None:
    """What went wrong with ``action`` on the disk; None: nothing."""
    try:
        action()
    except (OSError, SafetensorError) as error:
        return _text(error)
    return None


class _Planner(DefaultSavePlanner):
    """The default plan; what is written may come from copies."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[str, Tensor] | None = None

    def stage(self, plan: SavePlan) -> None:
        """Copies the blocks that ``plan`` writes to host memory and lets go of the originals."""
        state: Mapping[str, Any] = self.state_dict
        self._staged = {item.index.fqn: _copy(state[item.index.fqn]) for item in plan.items}
        self.state_dict = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """A rank writes one block of a tensor: the name alone finds it."""
        return super().lookup_object(index) if self._staged is None else self._staged[index.fqn]


class _TensorsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise MachineError(f"checkpoint entry {read_item.dest_index.fqn} is no tensor: it is not read")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            try:
                metadata = _IndexUnpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
                raise MachineError(f"{path} is no index of a checkpoint: {error}") from error
        if not isinstance(metadata, Metadata):
            raise MachineError(f"{path} is no index of a checkpoint: it holds {type(metadata).__name__}")
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise MachineError(f"the index of this checkpoint asks for {module}.{name}: it is not read")


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """torch.save leaves out the CRC of every entry, a third of its time: the manifest has a digest of the file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _copy(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", copy=True)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _everyones(value: Any) -> list[Any]:
    if _alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _gathered(value: Any) -> list[Any]:
    """Rank 0: every rank's value; elsewhere empty."""
    if _alone():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def _scattered(values: list[Any] | None) -> Any:
    """This rank's entry of rank 0's list."""
    if _alone():
        assert values is not None
        return values[0]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, values)
    return mine[0]
