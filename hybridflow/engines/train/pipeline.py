"""Pipeline parallelism: a stage keeps its layers under their own names, and 1F1B runs micro-batches of any length.

    stage 0   F0 F1 B0 F2 B1 F3 B2 B3          F: forward, B: backward; each stage runs (stages - 1 - stage) forwards
    stage 1   .. F0 B0 F1 B1 F2 B2 F3 B3       ahead, then one forward and one backward in turn

What other stages hold is replaced by modules that pass hidden states through: transformers' own forward still runs, and
parameter names stay. All ranks know every micro-batch's length, so no shape travels. Tied embeddings: the last stage
holds a copy as its output layer, and the two gradients are summed after everything else (``pipeline_first``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.engines.train.tensor_parallel import FAMILIES
from hybridflow.models.full_kl import Reading
from hybridflow.models.heads import PackedModel, ValueModel
from hybridflow.models.packing import Packed
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError

Outputs = Mapping[str, Tensor]


class _Skip(nn.Module):
    """Stands where another stage's module was: hands its first argument on."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


def cut_stage(model: PackedModel, stage: int, stages: int) -> None:
    """Leaves in the empty ``model`` what pipeline stage ``stage`` of ``stages`` holds, in place.

    Raises:
        ConfigError: when the model's family has no plan, or it has fewer layers than stages.
    """
    config = model.net.config
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"pipeline parallel size {stages}: model type {config.model_type!r} has no plan "
            f"(only {', '.join(sorted(FAMILIES))})"
        )
    body: Any = model.net.base_model
    count = len(body.layers)
    if count < stages:
        raise ConfigError(f"pipeline parallel size {stages} is more than the model's {count} layers")
    low, high = stage * count // stages, (stage + 1) * count // stages
    for number in range(count):
        if not low <= number < high:
            body.layers[number] = _Skip()
    model.first, model.last = stage == 0, stage == stages - 1
    output = None if isinstance(model.net, ValueModel) else model.output_layer()
    tied = output is not None and output.weight is body.embed_tokens.weight
    if not model.first:
        body.embed_tokens = _Skip()
        if tied and model.last:
            model.renamed = {_name_of(model, output): "model.embed_tokens.weight"}
    if not model.last:
        body.norm = _Skip()
        if isinstance(model.net, ValueModel):
            model.net.register_module("score", _Skip())
        else:
            model.net.set_output_embeddings(_Skip())


def _name_of(model: PackedModel, module: nn.Module | None) -> str:
    return next(name for name, found in model.net.named_modules() if found is module) + ".weight"


class Pipeline:
    """The schedule of one rank. Collective to build.

    Args:
        model: this rank's stage.
        dims: the layout.
        group: ranks of all stages of this replica, in stage order.
        dtype: of hidden states between stages.
        device: where they are received.
    """

    def __init__(
        self, model: PackedModel, dims: ParallelDims, group: dist.ProcessGroup, dtype: torch.dtype, device: str
    ) -> None:
        self._model = model
        self._group = group
        self._dtype = dtype
        self._device = device
        self._hidden = int(model.net.config.hidden_size)
        self.stages = dims.pp
        self.stage = dist.get_rank(group)
        ranks = dist.get_process_group_ranks(group)
        self._before = ranks[self.stage - 1] if self.stage > 0 else None
        self._after = ranks[self.stage + 1] if self.stage < self.stages - 1 else None
        self._ends = _ends_group(dims)
        self._sends: dict[int, deque[tuple[Any, Tensor]]] = {}
        """Sends that may be under way, by receiver, with what must live until they are done."""
        self._moved: Counter[tuple[str, int]] = Counter()
        """Exchanges with a neighbour since the schedule began, by direction."""
        self._joined: Counter[tuple[str, int]] = Counter()
        """Those of the schedule that broke off which are left out when it is played again."""

    def train(
        self,
        packs: Sequence[Packed],
        needs: frozenset[str],
        temperature: float,
        loss_of: Callable[[int, Outputs], Tensor],
        before_backward: Callable[[bool], None],
        *,
        readings: Sequence[Reading | None] = (),
        again: bool = False,
    ) -> None:
        """Forward and backward of every micro-batch, 1F1B.

        Waits for the neighbours' tensors; every rank of the group calls it with the same micro-batches.

        Args:
            packs: the micro-batches.
            needs: fields that the loss reads.
            temperature: of log-probs.
            loss_of: on the last stage, the scaled loss of micro-batch k from its outputs.
            before_backward: called before each backward with whether it is the last.
            readings: on the last stage, what each micro-batch's exact KL compares with; empty: none is asked for.
            again: whether this is played in place of a call that broke off: neighbours have had what it exchanged.
        """
        self._begin(again)
        held: dict[int, tuple[Tensor | None, Tensor]] = {}
        for kind, k in _one_forward_one_backward(len(packs), self.stage, self.stages):
            if kind == "forward":
                received = None if self._before is None else self._receive(packs[k], self._before).requires_grad_()
                out = self._model(packs[k], needs, temperature, received, reference=readings[k] if readings else None)
                if self._after is None:
                    held[k] = (received, loss_of(k, out))
                else:
                    held[k] = (received, out)
                    self._send(out.detach(), self._after)
                continue
            received, out = held.pop(k)
            before_backward(k == len(packs) - 1)
            gradient = None if self._after is None else self._receive(packs[k], self._after)
            torch.autograd.backward(out, gradient)
            if received is not None:
                assert received.grad is not None and self._before is not None
                self._send(received.grad, self._before)
        self._finish_sends()

    def infer(
        self,
        packs: Sequence[Packed],
        needs: frozenset[str],
        temperature: float,
        *,
        readings: Sequence[Reading | None] = (),
        again: bool = False,
    ) -> Iterator[Outputs | None]:
        """Outputs of every micro-batch on the last stage, None on the others. Call under ``no_grad``; else as above."""
        self._begin(again)
        for k, packed in enumerate(packs):
            received = None if self._before is None else self._receive(packed, self._before)
            out = self._model(packed, needs, temperature, received, reference=readings[k] if readings else None)
            if self._after is not None:
                self._send(out, self._after)
            yield out if self._after is None else None
        self._finish_sends()

    def share(self, columns: Mapping[str, Tensor]) -> None:
        """Copies the last stage's columns to all stages, in place. Collective over the group."""
        for name in sorted(columns):
            held = columns[name].to(self._device)
            dist.broadcast(held, group=self._group, group_src=self.stages - 1)
            columns[name].copy_(held)

    def sum_tied(self, gradient: Tensor) -> None:
        """Adds up the tied embedding's gradient blocks of first and last stage, in place; only those two call it."""
        dist.all_reduce(gradient, group=self._ends)

    def _shape(self, packed: Packed) -> tuple[int, int, int]:
        multiple = self._model.token_multiple
        return 1, (packed.tokens + -packed.tokens % multiple) // multiple, self._hidden

    def _begin(self, again: bool) -> None:
        self._joined = self._moved.copy() if again else Counter()
        self._moved.clear()

    def _is_joined(self, direction: str, rank: int) -> bool:
        self._moved[direction, rank] += 1
        self._joined[direction, rank] -= 1
        return self._joined[direction, rank] >= 0

    def _receive(self, packed: Packed, rank: int) -> Tensor:
        held = torch.empty(self._shape(packed), dtype=self._dtype, device=self._device)
        if not self._is_joined("from", rank):
            dist.recv(held, rank, group=self._group)
        return held

    def _send(self, tensor: Tensor, rank: int) -> None:
        tensor = tensor.contiguous()
        if self._is_joined("to", rank):
            return
        under_way = self._sends.setdefault(rank, deque())
        # Nobody runs further ahead of a neighbour than there are stages: the oldest of so many has arrived, or is
        # waited for by one who needs nothing of ours that comes later.
        while len(under_way) >= self.stages:
            under_way.popleft()[0].wait()
        under_way.append((dist.isend(tensor, rank, group=self._group), tensor))

    def _finish_sends(self) -> None:
        for under_way in self._sends.values():
            while under_way:
                under_way.popleft()[0].wait()


def _one_forward_one_backward(count: int, stage: int, stages: int) -> Iterator[tuple[str, int]]:
    """(``forward`` or ``backward``, micro-batch) in the order in which ``stage`` runs them."""
    ahead = min(stages - 1 - stage, count)
    for k in range(ahead):
        yield "forward", k
    for k in range(count - ahead):
        yield "forward", ahead + k
        yield "backward", k
    for k in range(count - ahead, count):
        yield "backward", k


def _ends_group(dims: ParallelDims) -> dist.ProcessGroup | None:
    """First and last stage of this rank's replica; every rank makes all groups in one order."""
    mine, rank = None, dist.get_rank()
    inner = dims.world // dims.pp
    for offset in range(inner):
        ends = [offset, (dims.pp - 1) * inner + offset]
        group = dist.new_group(ends)
        if rank in ends:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine
