"""torch's own pipeline schedules over packed rows: every micro-batch of an update is padded to its longest.

A schedule of ``torch.distributed.pipelining`` fixes the shape of its messages and the number of micro-batches when it
is built, and cuts what ``step`` is given along dim 0. So one is built for each update, with the longest packed row as
the length of all (padding is a segment of its own, of which no token reaches the loss), and ``step`` gets numbers only:

    step(number=[0 1 2 ..])  ->  cut into [0] [1] [2] ..  ->  stage module: packs[number], states received  ->  states

torch sees a stage without parameters. FSDP, whose gradients are reduced with the last backward, stays ours: a hook on
the output of each micro-batch says that its backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hybridflow.engines.train.pipeline import Outputs
from hybridflow.engines.train.shortage import ran_out
from hybridflow.models.full_kl import Reading
from hybridflow.models.heads import PackedModel
from hybridflow.models.packing import Packed
from hybridflow.utils.errors import DeviceMemoryError

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"torch_gpipe": ScheduleGPipe, "torch_1f1b": Schedule1F1B}


class TorchSchedule:
    """Forward and backward of updates on one rank, in the order of one of ``SCHEDULES``.

    Args:
        name: which.
        model: this rank's stage.
        group: ranks of all stages of this replica, in stage order.
        dtype: of hidden states between stages.
        device: where they are received.
    """

    def __init__(
        self, name: str, model: PackedModel, group: dist.ProcessGroup, dtype: torch.dtype, device: str
    ) -> None:
        self._name = name
        self._model = model
        self._group = group
        self._dtype = dtype
        self._device = device
        self._stages = dist.get_world_size(group)
        self.least = self._stages if SCHEDULES[name] is Schedule1F1B else 1
        """Micro-batches that an update must have."""

    def tokens(self, packs: Sequence[Packed]) -> int:
        """Tokens to which each of ``packs`` is padded; all stages hold the same ones."""
        multiple = self._model.token_multiple
        longest = max(packed.tokens for packed in packs)
        return longest + -longest % multiple

    def train(
        self,
        packs: Sequence[Packed],
        needs: frozenset[str],
        temperature: float,
        loss_of: Callable[[int, Outputs], Tensor],
        before_backward: Callable[[bool], None],
        *,
        readings: Sequence[Reading | None] = (),
    ) -> None:
        """Forward and backward of every micro-batch, at least ``least``; arguments as those of ``Pipeline.train``.

        Waits for the neighbours' tensors; every rank of the group calls it with the same micro-batches.

        Raises:
            DeviceMemoryError: on the rank that runs out of memory. Its peers wait for it until the deadline of their
                collectives: a schedule of torch cannot be played to its end without memory, as ours can.
        """
        tokens = self.tokens(packs)

        def play(number: int, received: Tensor | None) -> Tensor:
            packed, reading = packs[number].padded(tokens), readings[number] if readings else None
            out: Any = self._model(packed, needs, temperature, received, reference=reading)
            out = loss_of(number, out) if self._model.last else out.contiguous()
            last = number == len(packs) - 1
            out.register_hook(lambda _: before_backward(last))
            return out

        numbers = torch.arange(len(packs))
        try:
            schedule = self._schedule(_Stage(play), len(packs), tokens)
            schedule.step(number=numbers, target=numbers, return_outputs=False)
        except (RuntimeError, MemoryError) as error:
            # torch wraps what a stage raises.
            if ran_out(error) or (error.__cause__ is not None and ran_out(error.__cause__)):
                raise self._shortage(error.__cause__ or error, tokens) from error
            raise

    def _schedule(self, module: nn.Module, count: int, tokens: int) -> PipelineScheduleSingle:
        first, last = self._model.first, self._model.last
        shape = 1, tokens // self._model.token_multiple, int(self._model.net.config.hidden_size)
        states = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        stage = PipelineStage(
            module,
            dist.get_rank(self._group),
            self._stages,
            torch.device(self._device),
            input_args=() if first else states,
            output_args=torch.empty((), device="meta") if last else states,
            group=self._group,
        )
        # Losses are shares of sums: gradients of micro-batches add up.
        return SCHEDULES[self._name](stage, count, loss_fn=lambda loss, _: loss, scale_grads=False)

    def _shortage(self, error: BaseException, tokens: int) -> DeviceMemoryError:
        reason = str(error).partition("\n")[0]
        return DeviceMemoryError(
            f"rank {dist.get_rank()} ran out of memory in the update pass, in a micro-batch padded to {tokens} tokens. "
            f"pipeline_schedule={self._name} cannot be played again with smaller micro-batches: use "
            f"pipeline_schedule=1f1b, which is, or a smaller ppo_max_token_len_per_gpu. {reason}"
        )


class _Stage(nn.Module):
    """What torch takes for the stage: hands the number of a micro-batch, and what was received for it, to ``play``."""

    def __init__(self, play: Callable[[int, Tensor | None], Tensor]) -> None:
        super().__init__()
        self._play = play

    def forward(self, received: Tensor | None = None, *, number: Tensor) -> Tensor:
        return self._play(int(number), received)
