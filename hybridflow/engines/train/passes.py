"""Forward and backward passes of one rank over the micro-batches of its rows.

    rows -> micro-batches (equally many on every rank) -> packed rows -> model -> outputs, or loss and its gradient

A pass ends when every rank has played all of its micro-batches; where one ran out of memory, all cut smaller ones and
play again (shortage.py; not under torch's pipeline schedules). What becomes of the gradients is the engine's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from hybridflow.algorithms.contract import Counts, Loss, Outputs
from hybridflow.batch.batch import Batch
from hybridflow.engines.train import reduction
from hybridflow.engines.train.assembly import LORA, Assembled
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.mesh import Meshes
from hybridflow.engines.train.shortage import Attempt, Budgets, Shortage, give_up
from hybridflow.models.full_kl import Reading
from hybridflow.models.heads import HIDDEN, PLAIN_HEAD_FAMILIES, SELF_CHECK
from hybridflow.models.packing import Packed, pack, prompt_groups
from hybridflow.models.packing_check import sample_rows
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils import optional
from hybridflow.utils.errors import EngineError


class Passes:
    """What runs the model; every public method but ``compare_with`` is collective.

    Args:
        built: the model of this rank.
        dims: the layout.
        device: ``cpu`` or ``cuda:i``.
        where: its groups; losses are scaled by the number of ranks over which FSDP averages gradients.
        budgets: micro-batches of passes that ran out of memory before.
        optimizer: its gradients are dropped before each attempt; None: the model is frozen.
        share_prompts: whether rows of equal prompts in a micro-batch are encoded behind one copy of it.
    """

    def __init__(
        self,
        built: Assembled,
        *,
        dims: ParallelDims,
        device: str,
        where: Meshes,
        budgets: Budgets,
        optimizer: Optimizer | None,
        share_prompts: bool,
    ) -> None:
        self._built = built
        self._model = built.model
        self._pipeline = built.pipeline
        self._torch_schedule = built.torch_schedule
        self._dims = dims
        self._device = device
        self._reduced_over = where.reduced_over
        self._exchange_activations = where.exchange_activations
        self._budgets = budgets
        self._optimizer = optimizer
        self._share_prompts = share_prompts
        self._reference: Passes | None = None

    def compare_with(self, reference: Passes) -> None:
        """From now on ``full_kl`` can be asked for; both hold the same tokens and slices of the vocabulary."""
        self._reference = reference

    def check_architecture(self) -> None:
        """Asks a model of a family that no test knows whether packed rows stay apart in it (packing_check.py).

        Raises:
            ConfigError: on every rank, when they do not, or when its head is not what log-probs are made from.
        """
        config = self._model.net.config
        if config.model_type not in PLAIN_HEAD_FAMILIES:
            with self._model.evaluating():
                self._model(sample_rows(int(config.vocab_size), self._device), SELF_CHECK, 1.0)
            self.reshard()

    def infer(
        self, rows: Batch, needs: frozenset[str], *, temperature: float, micro: MicroBatching
    ) -> dict[str, Tensor]:
        """Without gradient: the fields ``needs`` of ``Outputs`` as ``[b, T]`` float32, row order kept."""
        self._model.eval()
        width = rows["response_ids"].shape[1]
        micro = self._budgets.of("forward", micro)
        while True:
            found = {name: torch.zeros(len(rows), width, dtype=torch.float32) for name in needs}
            attempt = self._attempt(needs)
            packs = self._infer_all(attempt, rows, needs, temperature, micro, found)
            shortage = attempt.agree()
            if shortage is None:
                self._built.meter.count(packs, self._model.token_multiple, trains=False)
                return found
            micro = self._smaller("forward", micro, attempt, shortage)

    def train(
        self, rows: Batch, loss: Loss, *, temperature: float, micro: MicroBatching, counts: Counts
    ) -> tuple[dict[str, reduction.Part], int]:
        """Leaves the gradients of a mini-batch in the parameters; this rank's metrics, and attempts that were void."""
        assert self._optimizer is not None
        self._model.train()
        micro, void = self._budgets.of("update", micro), 0
        while True:
            self._optimizer.zero_grad(set_to_none=True)
            attempt = self._attempt(loss.needs)
            sums: dict[str, reduction.Part] = {}
            packs = self._train_all(attempt, rows, loss, sums, temperature=temperature, micro=micro, counts=counts)
            shortage = attempt.agree()
            if shortage is None:
                fixed = None if self._torch_schedule is None else self._torch_schedule.tokens(packs)
                self._built.meter.count(packs, fixed or self._model.token_multiple, trains=True)
                return sums, void
            self._optimizer.zero_grad(set_to_none=True)
            self.reshard()
            micro, void = self._smaller("update", micro, attempt, shortage), void + 1

    def reshard(self) -> None:
        """Lets go of gathered weights, the reference's too; a rank does it alone.

        FSDP leaves the root gathered after a forward without backward: its shards are then not visible.
        """
        if isinstance(self._model, FSDPModule):
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        if self._reference is not None and self._reference is not self:
            self._reference.reshard()

    # -- one attempt --------------------------------------------------------------------------------------------------

    def _infer_all(
        self,
        attempt: Attempt,
        rows: Batch,
        needs: frozenset[str],
        temperature: float,
        micro: MicroBatching,
        found: Mapping[str, Tensor],
    ) -> Sequence[Packed]:
        """Fills ``found`` as far as the memory reaches; the micro-batches."""
        parts, _, packs = self._cut(rows, micro)

        def keep(part: Sequence[int], packed: Packed, read: Mapping[str, Tensor] | None) -> None:
            for name, value in (read or {}).items():
                found[name][part] = packed.unpack(value).to("cpu")

        with torch.no_grad():
            if self._pipeline is not None:
                readings = self._read_ahead(attempt, parts, packs, needs)
                infer = partial(self._pipeline.infer, packs, needs, temperature, readings=readings)

                def keep_all() -> None:
                    for part, packed, read in zip(parts, packs, infer(), strict=True):
                        keep(part, packed, read)

                attempt.run(keep_all, lambda: list(infer(again=True)), **_largest(parts, packs))
                self._pipeline.share(found)
            else:
                empty = pack(rows.rows([]).to(self._device))
                for part, packed in zip(parts, packs, strict=True):
                    attempt.run(
                        lambda part=part, packed=packed: keep(part, packed, self._read(packed, needs, temperature)),
                        lambda packed=packed: self._read(packed if attempt.hollow else empty, needs, temperature),
                        tokens=packed.tokens,
                        rows=len(part),
                    )
        self.reshard()
        return packs

    def _train_all(
        self,
        attempt: Attempt,
        rows: Batch,
        loss: Loss,
        sums: dict[str, reduction.Part],
        *,
        temperature: float,
        micro: MicroBatching,
        counts: Counts,
    ) -> list[Packed]:
        """Forward and backward of every micro-batch, as far as the memory reaches; metrics go into ``sums``."""
        least = 1 if self._torch_schedule is None else self._torch_schedule.least
        parts, blocks, packs = self._cut(rows, micro, at_least=least)

        def loss_of(number: int, read: Mapping[str, Tensor]) -> Tensor:
            outputs = {name: packs[number].unpack(value) for name, value in read.items()}
            return self._scaled_loss(blocks[number], outputs, loss, counts, sums)

        if self._torch_schedule is not None:
            tokens = self._torch_schedule.tokens(packs)
            padded = [packed.padded(tokens) for packed in packs]
            readings = self._read_ahead(attempt, parts, padded, loss.needs)
            self._torch_schedule.train(
                packs, loss.needs, temperature, loss_of, self._reduce_with_backward, readings=readings
            )
            return packs
        if self._pipeline is not None:
            readings = self._read_ahead(attempt, parts, packs, loss.needs)
            train = partial(self._pipeline.train, packs, loss.needs, temperature, readings=readings)
            attempt.run(
                lambda: train(loss_of, self._reduce_with_backward),
                lambda: train(lambda _, read: _void_loss(read), self._reduce_with_backward, again=True),
                **_largest(parts, packs),
            )
            return packs
        empty = pack(rows.rows([]).to(self._device))

        def stand_in(packed: Packed) -> None:
            _void_loss(self._read(packed if attempt.hollow else empty, loss.needs, temperature)).backward()

        for number, packed in enumerate(packs):
            self._reduce_with_backward(number == len(packs) - 1)
            attempt.run(
                lambda number=number, packed=packed: loss_of(
                    number, self._read(packed, loss.needs, temperature)
                ).backward(),
                partial(stand_in, packed),
                tokens=packed.tokens,
                rows=len(blocks[number]),
            )
        return packs

    def _cut(
        self, rows: Batch, micro: MicroBatching, *, at_least: int = 1
    ) -> tuple[list[list[int]], list[Batch], list[Packed]]:
        """Micro-batches, equally many on every rank: their row positions, rows on the device, packed rows."""
        groups = prompt_groups(rows) if self._share_prompts else None
        parts = reduction.cut_rounds(
            rows,
            micro,
            dims=self._dims,
            device=self._device,
            hidden=int(self._model.net.config.hidden_size),
            groups=groups,
            at_least=at_least,
        )
        blocks = [rows.rows(part).to(self._device) for part in parts]
        packs = [
            pack(block, None if groups is None else [groups[row] for row in part])
            for part, block in zip(parts, blocks, strict=True)
        ]
        return parts, blocks, packs

    def _read(self, packed: Packed, needs: frozenset[str], temperature: float) -> Mapping[str, Tensor]:
        if "full_kl" not in needs:
            return self._model(packed, needs, temperature)
        reference = self._compared()
        with reference._as_reference():
            reading = reference._model.reading(packed)
        return self._model(packed, needs, temperature, reference=reading)

    def _read_ahead(
        self, attempt: Attempt, parts: Sequence[Sequence[int]], packs: Sequence[Packed], needs: frozenset[str]
    ) -> list[Reading | None]:
        """Under a pipeline the reference runs through all micro-batches before the policy does: its readings.

        Empty where nothing is compared; None on all stages but the last.
        """
        if "full_kl" not in needs:
            return []
        reference, found = self._compared(), []
        attempt.run(
            lambda: found.extend(reference._readings(packs)),
            lambda: found.extend(reference._readings(packs, again=True)),
            **_largest(parts, packs),
        )
        return found

    def _readings(self, packs: Sequence[Packed], *, again: bool = False) -> list[Reading | None]:
        assert self._pipeline is not None
        with self._as_reference(), self._model.evaluating():
            read = list(self._pipeline.infer(packs, HIDDEN, 1.0, again=again))
        return [None if states is None else self._model.reading_of(states["hidden"]) for states in read]

    def _compared(self) -> Passes:
        if self._reference is None:
            raise EngineError("full_kl was asked for before compare_with named the reference")
        return self._reference

    def _as_reference(self) -> AbstractContextManager[None]:
        """Inside, the model is what it brings as the reference: with LoRA its frozen base."""
        return optional.load(f"{LORA}:AdaptersOff")(self._model) if self._built.adapted else nullcontext()

    def _scaled_loss(
        self,
        rows: Batch,
        outputs: Mapping[str, Tensor],
        loss: Loss,
        counts: Counts,
        sums: dict[str, reduction.Part],
    ) -> Tensor:
        """The loss of a micro-batch times the ranks over which FSDP averages; metrics go into ``sums``."""
        if len(rows) == 0:
            # Another rank still has rows: join its collectives with a gradient of zero.
            return torch.stack([value.sum() for value in outputs.values()]).sum()
        total, metrics = loss(Outputs(**outputs), rows, counts)
        reduction.add_metrics(sums, metrics)
        reduction.add_metrics(sums, {"loss": reduction.summed(total)})
        return total * self._reduced_over

    def _reduce_with_backward(self, last: bool) -> None:
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last)
            self._model.set_is_last_backward(last)
            # Layers that stay gathered from forward to backward may stay so until the last micro-batch.
            self._model.set_reshard_after_backward(last or self._built.reshards)

    def _attempt(self, needs: frozenset[str]) -> Attempt:
        models: list[torch.nn.Module] = [self._model]
        if "full_kl" in needs and self._reference is not None and self._reference is not self:
            models.append(self._reference._model)  # it joins in every micro-batch
        return Attempt(models, self._dims, self._exchange_activations, self._device)

    def _smaller(self, kind: str, micro: MicroBatching, attempt: Attempt, shortage: Shortage) -> MicroBatching:
        """How the next attempt is cut. Collective.

        Raises:
            DeviceMemoryError: on every rank, when a single row is too much for one of them.
        """
        if shortage.alone:
            parameters, world = self._built.parameters, self._dims.world
            raise give_up(kind, attempt, shortage, parameters, self._optimizer, self._device, world)
        return self._budgets.halve(kind, micro, shortage)


def _void_loss(read: Mapping[str, Tensor]) -> Tensor:
    """A loss of an attempt that is void: its gradient reaches every parameter, and is thrown away."""
    return torch.stack([value.sum() for value in read.values()]).sum()


def _largest(parts: Sequence[Sequence[int]], packs: Sequence[Packed]) -> dict[str, int]:
    """Of micro-batches that run as one: tokens of the largest, and rows of the one with the most."""
    return {"tokens": max(packed.tokens for packed in packs), "rows": max(map(len, parts))}
