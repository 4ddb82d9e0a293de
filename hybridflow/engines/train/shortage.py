"""Out of memory in a forward or backward pass: one rank runs out, all ranks stay in step, agree, and may try again.

A rank that raises in the middle of a micro-batch leaves its peers inside FSDP's collectives. So it frees what it holds
and plays the rest of that micro-batch with a made-up row of one token, leaving out the collectives that it had joined
already: every micro-batch issues the same sequence of them, whatever its rows are. All further micro-batches of the
attempt are played likewise; then all ranks agree that the attempt is void, drop its gradients and cut smaller ones.

    rank 0   G0 G1 G2 ... G1 S2 S1 S0 | agree      G: gather of a layer's weights, S: reduction of its gradients
    rank 1   G0 G1 x (..)  G2 ... S0  | agree      x: out of memory, (..): played up to here without communication

That is enough where data parallelism (FSDP, HSDP) is the only axis. Ranks of tensor, sequence and pipeline parallelism
exchange activations, whose sizes depend on the rows: there a rank plays the very micro-batch again, as shapes without
memory (hollow.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.hollow import Hollow, done, group_name
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import DeviceMemoryError

logger = logging.getLogger(__name__)

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""What the message of PyTorch's CPU allocator begins with, whose error is a plain RuntimeError."""


def ran_out(error: BaseException) -> bool:
    """Whether an allocator had nothing left to give."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What all ranks know of a void attempt."""

    rank: int
    """A rank that ran out (the last of them)."""
    tokens: int
    """Tokens of the largest micro-batch in which a rank ran out."""
    alone: bool
    """Whether one of these micro-batches was a single row, which cannot be cut."""


class Attempt:
    """One pass over the micro-batches of a rank.

    Args:
        models: what runs in a micro-batch; ``FSDPModule`` where there are shards.
        dims: the layout.
        groups: in which this rank exchanges activations: those of tensor and sequence parallelism.
        device: of this rank.
    """

    def __init__(
        self, models: Sequence[nn.Module], dims: ParallelDims, groups: Sequence[dist.ProcessGroup], device: str
    ) -> None:
        self._models = models
        self._dims = dims
        self._device = device
        self._sharded = _Sharded(models, groups) if dims.world > 1 else None
        self.hollow = dims.pp * dims.sp * dims.tp > 1
        """Whether stand-ins must be of the very micro-batch, and are played without memory."""
        self._void: tuple[int, int] | None = None
        self.reason = ""
        """First line of this rank's allocator error."""

    def run(self, play: Callable[[], None], stand_in: Callable[[], object], *, tokens: int, rows: int) -> None:
        """Runs ``play``, a micro-batch; out of memory, it runs ``stand_in`` to the same sequence of collectives."""
        if self._void is not None:
            with Hollow({}) if self.hollow else contextlib.nullcontext():
                stand_in()
            return
        before = None if self._sharded is None else _Position(self._sharded)
        try:
            play()
            return
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            self.reason = str(error).partition("\n")[0]
        # Only here, behind the except, are the frames gone that hold the pass's tensors.
        self._void = (tokens, rows)
        for model in self._models:
            if isinstance(model, FSDPModule):
                model.reset_iter_state()
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()
        if before is not None:
            with before.restored(Hollow if self.hollow else _Silence):
                stand_in()

    def agree(self) -> Shortage | None:
        """What every rank knows after its last micro-batch; None: nobody ran out. Collective."""
        tokens, rows = self._void or (0, 2)
        rank = _rank() + 1 if self._void is not None else 0
        held = torch.tensor([rank, tokens, int(rows <= 1)], dtype=torch.long, device=self._device)
        if self._dims.world > 1:
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
        last, most, alone = held.tolist()
        return Shortage(rank=last - 1, tokens=most, alone=bool(alone)) if last else None


class Budgets:
    """Micro-batches of passes that ran out of memory once stay small."""

    def __init__(self) -> None:
        self._caps: dict[str, MicroBatching] = {}

    def state_dict(self) -> dict[str, dict[str, int | None]]:
        """Caps by kind of pass, as plain values."""
        return {kind: asdict(cap) for kind, cap in self._caps.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int | None]]) -> None:
        """Goes on from the caps of a checkpoint: the same micro-batches, to the last bit of their sums."""
        self._caps = {kind: MicroBatching(**cap) for kind, cap in state.items()}

    def of(self, kind: str, micro: MicroBatching) -> MicroBatching:
        """``micro`` within what is known to fit; ``kind``: update or forward."""
        cap = self._caps.get(kind, micro)
        if micro.max_tokens is not None and cap.max_tokens is not None:
            return replace(micro, max_tokens=min(micro.max_tokens, cap.max_tokens))
        if micro.max_rows is not None and cap.max_rows is not None:
            return replace(micro, max_rows=min(micro.max_rows, cap.max_rows))
        return micro

    def halve(self, kind: str, micro: MicroBatching, shortage: Shortage) -> MicroBatching:
        """From now on half of what was used, or of what was too much if that is less; also for later calls."""
        if micro.max_tokens is not None:
            before, unit = min(micro.max_tokens, shortage.tokens), "tokens"
            cap = MicroBatching(max_tokens=max(1, before // 2))
        else:
            assert micro.max_rows is not None
            before, unit = micro.max_rows, "rows"
            cap = MicroBatching(max_rows=max(1, before // 2))
        self._caps[kind] = cap
        logger.warning(
            "rank %d ran out of memory in a micro-batch of %d tokens (%s pass): the pass is done again with at most "
            "%d %s a micro-batch instead of %d, and so are all later ones; the result does not depend on it. Set "
            "the role's *_max_token_len_per_gpu or *_micro_batch_size_per_gpu to that to save the failed attempt",
            shortage.rank, shortage.tokens, kind, cap.max_tokens or cap.max_rows, unit, before,
        )  # fmt: skip
        return cap


def give_up(
    kind: str,
    attempt: Attempt,
    shortage: Shortage,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    device: str,
    world: int,
) -> DeviceMemoryError:
    """The error of a row that does not fit by itself, the same on every rank. Collective."""
    mine = None
    if attempt.reason:
        held = ", ".join(f"{name} {_size(count)}" for name, count in consumers(parameters, optimizer, device))
        mine = f"{attempt.reason}. Biggest consumers: {held}"
    texts: list[str | None] = [mine]
    if world > 1:
        texts = [None] * world
        dist.all_gather_object(texts, mine)
    told = texts[shortage.rank if world > 1 else 0]
    return DeviceMemoryError(
        f"rank {shortage.rank} ran out of memory in the {kind} pass over a single row, at most {shortage.tokens} "
        f"tokens in a micro-batch: cutting smaller micro-batches cannot help. {told}"
    )


def consumers(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None, device: str
) -> list[tuple[str, int]]:
    """Bytes on this rank by what they are for, the largest first."""
    found = {
        "parameters": sum(_bytes(parameter) for parameter in parameters.values()),
        "gradients": sum(_bytes(held.grad) for held in parameters.values() if held.grad is not None),
    }
    if optimizer is not None:
        states = [value for state in optimizer.state.values() for value in state.values()]
        found["optimizer state"] = sum(_bytes(value) for value in states if isinstance(value, Tensor))
    known = sum(found.values())
    if device.startswith("cuda"):  # not run here: needs CUDA
        free, total = torch.cuda.mem_get_info(device)
        found["activations and gathered weights at the peak"] = max(0, torch.cuda.max_memory_allocated(device) - known)
        others = total - free - torch.cuda.memory_reserved(device)
        found["generator and other processes on the device"] = max(0, others)
    else:
        found["rest of this process (activations, generator, libraries)"] = max(
            0, psutil.Process().memory_info().rss - known
        )
    return sorted(found.items(), key=lambda item: -item[1])


class _Sharded:
    """The FSDP units of models and the groups of ranks in which these and others communicate.

    Reads attributes of FSDP2's own states (torch 2.13): it has no public way to ask for them.
    """

    def __init__(self, models: Sequence[nn.Module], others: Sequence[dist.ProcessGroup]) -> None:
        for model in models:
            if isinstance(model, FSDPModule):
                # What FSDP sets up in a model's first forward: memory may end in another model's before that.
                model._get_fsdp_state()._lazy_init()
        by_model = [list(_fsdp_units(model)) for model in models]
        self.roots = [units[0] for units in by_model if units]
        self.units = [unit for units in by_model for unit in units]
        # All groups of the process: DTensor remembers by equal meshes how results are cut, so that one engine may well
        # exchange in the groups of another one's mesh.
        self.communicators: dict[str, Any] = {group.group_name: group for group in dist.distributed_c10d._world.pg_map}
        for mesh in {id(unit.mesh_info.mesh): unit.mesh_info.mesh for unit in self.units}.values():
            for axis in range(mesh.ndim):
                communicator = mesh.get_group(axis)
                self.communicators[communicator.group_name] = communicator

    def make_buffers(self) -> None:
        """Has the buffers of gathered weights made that FSDP makes at a unit's first gather and keeps for ever."""
        for unit in self.units:
            if any(not held.all_gather_outputs for held in unit.fsdp_params):
                with _Silence(None):
                    unit.unshard()
                unit.wait_for_unshard()
                unit.reshard()

    def issued(self) -> dict[str, int]:
        """Collectives so far by group."""
        return {name: group._get_sequence_number_for_group() for name, group in self.communicators.items()}


class _Position:
    """Where FSDP stands before a micro-batch: which weights are gathered, what was prefetched, collectives so far."""

    def __init__(self, sharded: _Sharded) -> None:
        self._sharded = sharded
        self._gathered = [unit.is_unsharded for unit in sharded.units]
        self._prefetched = [unit._all_gather_result is not None for unit in sharded.units]
        self._uses = [list(unit._post_forward_indices) for unit in sharded.units]
        self._orders = [list(_forward_order(root)) for root in sharded.roots]
        self._issued = sharded.issued()

    @contextlib.contextmanager
    def restored(self, leaving_out: Callable[[dict[str, int]], TorchDispatchMode]) -> Iterator[None]:
        """Puts FSDP back to here; inside, ``leaving_out`` leaves out the collectives that were joined since."""
        joined = {name: count - self._issued[name] for name, count in self._sharded.issued().items()}
        self._sharded.make_buffers()  # inside ``Hollow`` they would be no memory at all
        units = self._sharded.units
        for unit, gathered, prefetched, uses in zip(units, self._gathered, self._prefetched, self._uses, strict=True):
            unit._post_forward_indices[:] = uses
            if gathered or prefetched:
                with _Silence(None):
                    unit.unshard()
            if gathered:
                unit.wait_for_unshard()
        for root, order in zip(self._sharded.roots, self._orders, strict=True):
            _forward_order(root)[:] = order
        with leaving_out(joined):
            yield


def _forward_order(unit: Any) -> list[Any]:
    """A model's own list of its units as forward passes met them; it does not exist before the first pass."""
    return vars(unit.comm_ctx).get("post_forward_order", [])


def _fsdp_units(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


class _Silence(TorchDispatchMode):
    """Leaves out the next collectives of every group, as many as ``left`` says by name (None: all); results are 0."""

    def __init__(self, left: dict[str, int] | None) -> None:
        super().__init__()
        self._left = left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or not self._is_silent(func, args):
            return func(*args, **(kwargs or {}))
        for tensor in [args[0]] if isinstance(args[0], Tensor) else args[0]:
            tensor.zero_()
        return done(func, args)

    def _is_silent(self, func: Any, args: Sequence[Any]) -> bool:
        if self._left is None:
            return True
        name = group_name(func, args)
        if self._left.get(name, 0) == 0:
            return False
        self._left[name] -= 1
        return True


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
