"""``FSDPEngine``: the native training engine, FSDP2 over packed rows.

One update: cut this rank's rows into micro-batches (equally many on every rank), run each forward and backward, reduce
gradients once with the last, agree on loss, norm and metrics, clip, step. Losses are sums over the whole mini-batch
(algorithms/contract.py); FSDP averages over its ranks, so each loss is scaled by their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hybridflow.algorithms.contract import Counts, Loss, Outputs
from hybridflow.batch.batch import Batch
from hybridflow.config.model import FSDPConfig, ModelConfig, OptimConfig
from hybridflow.engines.train import checkpoint, reduction
from hybridflow.engines.train.assembly import EMBEDDING, LORA, assemble
from hybridflow.engines.train.base import MicroBatching, Shard
from hybridflow.engines.train.mesh import meshes
from hybridflow.engines.train.offload import move_state
from hybridflow.engines.train.optimizer import build_optimizer, clip, gradient_norm, held_bytes, settle_gradients
from hybridflow.engines.train.parallelize import refuse_unsupported
from hybridflow.engines.train.schedule import schedule
from hybridflow.engines.train.shortage import Attempt, Budgets, Shortage, give_up
from hybridflow.engines.train.work import Work, peak_flops
from hybridflow.models.full_kl import Reading
from hybridflow.models.heads import Head
from hybridflow.models.load import (
    box_of,
    dtype_of,
    local_of,
    placed_like,
)
from hybridflow.models.packing import Packed, pack, prompt_groups
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils import optional
from hybridflow.utils.errors import ConfigError, EngineError, StateError


class FSDPEngine:
    """One rank of a training engine. Collective to build: every rank passes equal arguments.

    Args:
        model: the Hugging Face folder and how it runs.
        head: ``lm`` (log-probs, entropy) or ``value`` (values).
        sharding: FSDP settings; degrees come from ``dims``.
        dims: the layout.
        optim: None for a frozen model (reference, reward model).
        grad_clip: maximum gradient norm; 0 or less: none.
        device: ``cpu`` or ``cuda:i``.
        total_steps: length of the schedule in its own unit; None when it needs none.
        seed: of everything random in the engine.
        shard_order: ``order[i * S + s]`` is the rank with shard index s in replica i; None: by rank.
        row_parallel_shard_dim1: whether row-parallel weights are cut along dim 1 where that is even.
        vocab_limit: ids from here on are never sampled: probability 0 in log-probs and entropy; None: there are none.
        compile_layers: whether torch.compile compiles the layers (GPU).
        share_prompts: whether rows of equal prompts in a micro-batch are encoded behind one copy of it.

    Raises:
        ConfigError: for what this engine does not support.
        MachineError: when the model's weights cannot be read.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        head: Head,
        sharding: FSDPConfig,
        dims: ParallelDims,
        optim: OptimConfig | None,
        grad_clip: float = 1.0,
        device: str = "cpu",
        total_steps: int | None = None,
        seed: int = 0,
        shard_order: Sequence[int] | None = None,
        row_parallel_shard_dim1: bool = False,
        vocab_limit: int | None = None,
        compile_layers: bool = False,
        share_prompts: bool = False,
    ) -> None:
        refuse_unsupported(dims, model, sharding, device=device, compiles=compile_layers)
        self.dims = dims
        self._config = model
        self._sharding = sharding
        self._device = device
        self._grad_clip = grad_clip
        mixed = dtype_of(sharding.mixed_precision.param_dtype) != dtype_of(sharding.model_dtype)
        always_fsdp = mixed or sharding.offload_policy
        kind = device.partition(":")[0]
        self._meshes = meshes(dims, kind, shard_order, always_fsdp=always_fsdp)
        torch.manual_seed(seed)
        self._share_prompts = share_prompts
        built = assemble(
            model,
            head,
            sharding=sharding,
            dims=dims,
            where=self._meshes,
            device=device,
            trains=optim is not None,
            seed=seed,
            vocab_limit=vocab_limit,
            row_parallel_shard_dim1=row_parallel_shard_dim1,
            compile_layers=compile_layers,
        )
        self._model, self._parameters = built.model, built.parameters
        self._shapes, self._adapter_shapes = built.shapes, built.adapter_shapes
        self._adapted = built.adapted
        self._layer_names, self._tied_ends = built.layer_names, built.tied_ends
        self._meter, self._reshards, self._pipeline = built.meter, built.reshards, built.pipeline
        self._reference: FSDPEngine | None = None
        self._done = 0
        self._saving: checkpoint.StateSave | None = None
        self._budgets = Budgets()
        self._optim = optim
        self._schedule = None if optim is None else schedule(optim, total_steps)
        self._optimizer = (
            None if optim is None else build_optimizer(self._parameters, optim, in_layers=self._layer_names)
        )
        self._apply_rate()

    # -- forward and update -------------------------------------------------------------------------------------------

    def forward_without_adapters(
        self, rows: Batch, needs: frozenset[str], *, temperature: float, micro: MicroBatching
    ) -> dict[str, Tensor]:
        """``forward`` of the frozen base: with LoRA, the reference policy. Collective.

        Raises:
            EngineError: when the engine has no adapters.
        """
        if not self._adapted:
            raise EngineError("this engine trains all weights: it holds no reference policy")
        with optional.load(f"{LORA}:AdaptersOff")(self._model):
            return self.forward(rows, needs, temperature=temperature, micro=micro)

    def forward(
        self, rows: Batch, needs: frozenset[str], *, temperature: float, micro: MicroBatching
    ) -> dict[str, Tensor]:
        """Without gradient: the asked-for fields of ``Outputs`` as ``[b, T]`` float32, row order kept. Collective."""
        self._model.eval()
        width = rows["response_ids"].shape[1]
        micro = self._budgets.of("forward", micro)
        while True:
            found = {name: torch.zeros(len(rows), width, dtype=torch.float32) for name in needs}
            attempt = self._attempt(needs)
            packs = self._infer_all(attempt, rows, needs, temperature, micro, found)
            shortage = attempt.agree()
            if shortage is None:
                self._meter.count(packs, self._model.token_multiple, trains=False)
                return found
            micro = self._smaller("forward", micro, attempt, shortage)

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
                outputs = self._pipeline.infer(packs, needs, temperature)

                def infer() -> None:
                    for part, packed, read in zip(parts, packs, outputs, strict=True):
                        keep(part, packed, read)

                attempt.run(infer, _nothing, tokens=max(packed.tokens for packed in packs), rows=len(rows))
                self._pipeline.share(found)
            else:
                empty = pack(rows.rows([]).to(self._device))
                for part, packed in zip(parts, packs, strict=True):
                    attempt.run(
                        lambda part=part, packed=packed: keep(part, packed, self._read(packed, needs, temperature)),
                        lambda: self._read(empty, needs, temperature),
                        tokens=packed.tokens,
                        rows=len(part),
                    )
        self._reshard()
        return packs

    def _cut(self, rows: Batch, micro: MicroBatching) -> tuple[list[list[int]], list[Batch], list[Packed]]:
        """Micro-batches, equally many on every rank: their row positions, rows on the device, packed rows."""
        groups = prompt_groups(rows) if self._share_prompts else None
        parts = reduction.cut_rounds(rows, micro, dims=self.dims, device=self._device, groups=groups)
        blocks = [rows.rows(part).to(self._device) for part in parts]
        packs = [
            pack(block, None if groups is None else [groups[row] for row in part])
            for part, block in zip(parts, blocks, strict=True)
        ]
        return parts, blocks, packs

    def _read(self, packed: Packed, needs: frozenset[str], temperature: float) -> Mapping[str, Tensor]:
        if "full_kl" not in needs:
            return self._model(packed, needs, temperature)
        if self._reference is None:
            raise EngineError("full_kl was asked for before compare_with named the reference")
        reference = self._reference._reading(packed)
        return self._model(packed, needs, temperature, reference=reference)

    def _reading(self, packed: Packed) -> Reading:
        """What this engine brings as the reference: with LoRA its frozen base. Collective."""
        if not self._adapted:
            return self._model.reading(packed)
        with optional.load(f"{LORA}:AdaptersOff")(self._model):
            return self._model.reading(packed)

    def compare_with(self, reference: FSDPEngine) -> None:
        """From now on ``full_kl`` can be asked for: the exact KL to ``reference``, evaluated on the same micro-batches.

        ``reference`` is another engine in this process, or with LoRA this one: its base without adapters.

        Raises:
            ConfigError: when the two do not hold the same tokens and slices of the vocabulary, or under a pipeline.
        """
        ours, theirs = self.dims, reference.dims
        if self._pipeline is not None or (ours.tp, ours.sp, ours.pp) != (theirs.tp, theirs.sp, theirs.pp):
            raise ConfigError(
                "the exact KL needs both models on the same ranks, cut in the same way and not into pipeline stages: "
                f"the policy has tp {ours.tp} x sp {ours.sp} x pp {ours.pp}, the reference tp {theirs.tp} x sp "
                f"{theirs.sp} x pp {theirs.pp}"
            )
        self._reference = reference

    def update(
        self, rows: Batch, loss: Loss, *, temperature: float, micro: MicroBatching, counts: Counts
    ) -> dict[str, float]:
        """One optimizer step on one mini-batch (this rank's rows of it). Collective: every rank calls it.

        Metrics are equal on every rank: the loss's own, ``loss``, ``grad/norm`` (before clipping), ``grad/skipped`` and
        ``lr``. A non-finite loss or gradient, or a mini-batch without a token to learn from, skips the step and leaves
        weights and moments untouched.

        A pass that runs out of memory is done again with smaller micro-batches (shortage.py); ``out_of_memory`` counts.

        Raises:
            EngineError: when the engine was built without an optimizer.
            DeviceMemoryError: on every rank, when a single row is too much for one of them.
        """
        if self._optimizer is None:
            raise EngineError("this engine is frozen (optim=None): it cannot be updated")
        self._model.train()
        micro, void = self._budgets.of("update", micro), 0
        while True:
            self._optimizer.zero_grad(set_to_none=True)
            attempt = self._attempt(loss.needs)
            sums: dict[str, reduction.Part] = {}
            packs = self._accumulate(attempt, rows, loss, sums, temperature=temperature, micro=micro, counts=counts)
            shortage = attempt.agree()
            if shortage is None:
                break
            self._optimizer.zero_grad(set_to_none=True)
            self._reshard()
            micro, void = self._smaller("update", micro, attempt, shortage), void + 1
        self._meter.count(packs, self._model.token_multiple, trains=True)
        norm = self._settled_norm()
        metrics = reduction.gather_metrics(sums, self.dims)
        finite = math.isfinite(float(norm)) and math.isfinite(metrics.get("loss", 0.0))
        step = finite and counts.tokens > 0
        if step:
            clip(self._parameters.values(), norm, self._grad_clip)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._reshard()
        metrics |= {"grad/norm": float(norm), "grad/skipped": 0.0 if step else 1.0}
        return {**metrics, "lr": self._rate(), "out_of_memory": float(void)}

    def _accumulate(
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
        _, blocks, packs = self._cut(rows, micro)

        def loss_of(number: int, read: Mapping[str, Tensor]) -> Tensor:
            outputs = {name: packs[number].unpack(value) for name, value in read.items()}
            return self._scaled_loss(blocks[number], outputs, loss, counts, sums)

        if self._pipeline is not None:
            train = partial(self._pipeline.train, packs, loss.needs, temperature, loss_of, self._reduce_with_backward)
            attempt.run(train, _nothing, tokens=max(packed.tokens for packed in packs), rows=len(rows))
            return packs
        empty = rows.rows([]).to(self._device)

        def stand_in() -> None:
            packed = pack(empty)
            read = self._read(packed, loss.needs, temperature)
            outputs = {name: packed.unpack(value) for name, value in read.items()}
            self._scaled_loss(empty, outputs, loss, counts, {}).backward()

        for number, packed in enumerate(packs):
            self._reduce_with_backward(number == len(packs) - 1)
            attempt.run(
                lambda number=number, packed=packed: loss_of(
                    number, self._read(packed, loss.needs, temperature)
                ).backward(),
                stand_in,
                tokens=packed.tokens,
                rows=len(blocks[number]),
            )
        return packs

    def _attempt(self, needs: frozenset[str]) -> Attempt:
        models: list[torch.nn.Module] = [self._model]
        if "full_kl" in needs and self._reference is not None and self._reference is not self:
            models.append(self._reference._model)  # it joins in every micro-batch
        return Attempt(models, self.dims, self._device)

    def _smaller(self, kind: str, micro: MicroBatching, attempt: Attempt, shortage: Shortage) -> MicroBatching:
        """How the next attempt is cut. Collective.

        Raises:
            DeviceMemoryError: on every rank, when a single row is too much for one of them.
        """
        if shortage.alone:
            raise give_up(kind, attempt, shortage, self._parameters, self._optimizer, self._device, self.dims.world)
        return self._budgets.halve(kind, micro, shortage)

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
        return total * self._meshes.reduced_over

    def _settled_norm(self) -> Tensor:
        """Finishes the gradient's reduction and returns its global norm. Collective."""
        settle_gradients(self._parameters.values())
        counted = dict(self._parameters)
        if self._pipeline is not None and self._tied_ends:
            grad = self._parameters[EMBEDDING].grad if EMBEDDING in self._parameters else None
            if grad is not None:
                self._pipeline.sum_tied(local_of(grad))
            if not self._model.first:
                counted.pop(EMBEDDING, None)
        return gradient_norm(counted.values(), self._meshes.pp)

    def counts(self, rows: Batch) -> Counts:
        """Counts of a mini-batch summed over data-parallel ranks. Collective."""
        return reduction.count(rows, self.dims, self._device)

    def _reduce_with_backward(self, last: bool) -> None:
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last)
            self._model.set_is_last_backward(last)
            # Layers that stay gathered from forward to backward may stay so until the last micro-batch.
            self._model.set_reshard_after_backward(last or self._reshards)

    def _reshard(self) -> None:
        # FSDP leaves the root gathered after a forward without backward: its shards are then not visible.
        if isinstance(self._model, FSDPModule):
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        if self._reference is not None and self._reference is not self:
            self._reference._reshard()

    # -- what it costs ------------------------------------------------------------------------------------------------

    def work(self) -> Work:
        """What forwards and updates have computed since the last call, over all ranks. Collective."""
        return self._meter.take()

    def peak_flops(self) -> float:
        """FLOP/s that one device can reach in the dtype of forward and backward."""
        return peak_flops(self._device, dtype_of(self._sharding.mixed_precision.param_dtype))

    def largest(self, value: float) -> float:
        """The largest ``value`` of all ranks. Collective."""
        return reduction.reduce_max(value, self.dims, self._device)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state that this rank holds now."""
        return held_bytes(self._parameters.values(), self._optimizer)

    # -- schedule -----------------------------------------------------------------------------------------------------

    def schedule_step(self) -> float:
        """Advances the learning-rate schedule by one unit; the rate that the next update will use."""
        self._done += 1
        self._apply_rate()
        return self._rate()

    def _rate(self) -> float:
        if self._schedule is None or self._optim is None:
            return 0.0
        return self._optim.lr * self._schedule.factor(self._done)

    def _apply_rate(self) -> None:
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate()

    # -- weights ------------------------------------------------------------------------------------------------------

    def shards(self) -> Sequence[Shard]:
        """This rank's blocks of all parameters, in one order on all ranks; buffers excluded, ties once.

        With LoRA the blocks of adapted weights are copies with the adapters added in, and the call is collective.
        """
        self._reshard()
        return self._blocks(self._shapes, self._merged())

    def base_shards(self) -> Sequence[Shard]:
        """``shards`` of the frozen base: with LoRA, without the adapters."""
        self._reshard()
        return self._blocks(self._shapes, {})

    def adapter_shards(self) -> Sequence[Shard]:
        """This rank's blocks of LoRA's A and B, in one order on all ranks; empty without adapters."""
        self._reshard()
        return self._blocks(self._adapter_shapes, {})

    def _blocks(self, shapes: Mapping[str, tuple[int, ...]], merged: Mapping[str, Tensor]) -> list[Shard]:
        own = self._model.hf_parameters()
        found = []
        for name, shape in shapes.items():
            if name in own:
                local = merged[name] if name in merged else local_of(own[name])
                found.append(Shard(name, local, box_of(own[name], shape), shape))
            else:
                # On another pipeline stage: an empty block keeps the order equal on all ranks.
                nothing = torch.empty((0,) * len(shape), dtype=dtype_of(self._sharding.model_dtype))
                found.append(Shard(name, nothing, ((0, 0),) * len(shape), shape))
        return found

    def _merged(self) -> Mapping[str, Tensor]:
        if not self._adapted:
            return {}
        return optional.load(f"{LORA}:merged_blocks")(self._model, self._parameters)

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape by Hugging Face name, in the order of ``shards``."""
        return dict(self._shapes)

    def offload(self, what: Iterable[str]) -> None:
        """Moves ``parameters`` and/or ``optimizer`` to host memory (GPU only; nothing to do on CPU)."""
        self._move(what, "cpu")

    def onload(self, what: Iterable[str]) -> None:
        """Moves them back."""
        self._move(what, self._device)

    def _move(self, what: Iterable[str], device: str) -> None:
        chosen = set(what)
        if unknown := chosen - {"parameters", "optimizer"}:
            raise ConfigError(f"cannot move {', '.join(sorted(unknown))}: choose parameters, optimizer")
        if self._device == "cpu" or self._sharding.offload_policy:
            return
        self._reshard()
        move_state(chosen, device, model=self._model, optimizer=self._optimizer)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: str, *, contents: Sequence[str] = checkpoint.ALL, background: bool = False) -> None:
        """Writes this role's model, optimizer and schedule into ``folder``. Collective.

        In the background only a copy in host memory is made before this returns; ``finish_save`` ends the save.

        Raises:
            StateError: the save before this one has not been finished.
            MachineError: on every rank, when any rank cannot write.
        """
        if self._saving is not None:
            raise StateError("a checkpoint is still being written: finish_save comes before the next save")
        self._reshard()
        saving = checkpoint.StateSave(
            folder,
            self._trained(),
            self._optimizer,
            {"schedule_done": self._done},
            contents=contents,
            background=background,
        )
        self._saving = saving if background else None

    def saved(self) -> bool:
        """Whether this rank has nothing left to write; does not wait."""
        return self._saving is None or self._saving.written

    def finish_save(self) -> None:
        """Waits for a save in the background and completes it; nothing to do without one. Collective.

        Raises:
            MachineError: on every rank, when any rank could not write.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def _trained(self) -> Mapping[str, torch.nn.Parameter]:
        """What a checkpoint holds: all weights, or with LoRA the trained ones."""
        if not self._adapted:
            return self._parameters
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def load(self, folder: str, *, contents: Sequence[str] = checkpoint.ALL) -> None:
        """Restores what ``save`` wrote, at any layout. Collective."""
        self._reshard()
        extra = checkpoint.load_state(folder, self._trained(), self._optimizer, contents=contents)
        if "extra" in contents:
            self._done = int(extra["schedule_done"])
        self._apply_rate()

    def save_hf(self, folder: str, *, dtype: str | None = None) -> None:
        """Writes a Hugging Face folder that ``from_pretrained`` reads; None: in the dtype of the master weights.

        Collective.
        """
        self._reshard()
        own, merged = self._parameters, self._merged()
        checkpoint.save_hf(
            folder,
            {name: placed_like(merged[name], held) if name in merged else held for name, held in own.items()},
            self._model.net.config,
            names=list(self._shapes),
            stages=self._meshes.pp,
            source=self._config.path,
            dtype=None if dtype is None else dtype_of(dtype),
        )

    def save_adapters(self, folder: str) -> None:
        """Writes the adapters as PEFT does; ``model.lora_adapter_path`` and PEFT read them. Collective.

        Raises:
            EngineError: when the engine has no adapters.
        """
        if not self._adapted:
            raise EngineError("this engine trains all weights: it has no adapters to save")
        self._reshard()
        checkpoint.save_adapters(
            folder,
            self._parameters,
            optional.load(f"{LORA}:adapter_config")(self._model, self._config.path),
            names=list(self._adapter_shapes),
            stages=self._meshes.pp,
        )


def _nothing() -> None:
    """Stands in where ranks cannot stay in step: the attempt has raised before."""
