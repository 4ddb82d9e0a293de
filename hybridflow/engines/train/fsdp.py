"""``FSDPEngine``: the native training engine, FSDP2 over packed rows.

One update: cut this rank's rows into micro-batches (equally many on every rank), run each forward and backward, reduce
gradients once with the last (passes.py), agree on loss, norm and metrics, clip, step. Losses are sums over the whole
mini-batch (algorithms/contract.py); FSDP averages over its ranks, so each loss is scaled by their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.contract import Counts, Loss
from hybridflow.batch.batch import Batch
from hybridflow.config.model import FSDPConfig, ModelConfig, OptimConfig
from hybridflow.engines.train import checkpoint, reduction
from hybridflow.engines.train.assembly import EMBEDDING, LORA, assemble
from hybridflow.engines.train.base import MicroBatching, Shard
from hybridflow.engines.train.mesh import meshes
from hybridflow.engines.train.offload import move_state
from hybridflow.engines.train.optimizer import build_optimizer, clip, gradient_norm, held_bytes, settle_gradients
from hybridflow.engines.train.parallelize import refuse_unsupported
from hybridflow.engines.train.passes import Passes
from hybridflow.engines.train.schedule import schedule
from hybridflow.engines.train.shortage import Budgets
from hybridflow.engines.train.work import Work, peak_flops
from hybridflow.models.heads import Head
from hybridflow.models.load import box_of, dtype_of, local_of, placed_like
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
        pipeline_schedule: how an update's micro-batches are ordered over pipeline stages, where there are several.

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
        pipeline_schedule: str = "1f1b",
    ) -> None:
        refuse_unsupported(dims, model, sharding, device=device, compiles=compile_layers)
        self.dims = dims
        self._config, self._sharding = model, sharding
        self._device, self._grad_clip = device, grad_clip
        mixed = dtype_of(sharding.mixed_precision.param_dtype) != dtype_of(sharding.model_dtype)
        self._meshes = meshes(dims, device.partition(":")[0], shard_order, always_fsdp=mixed or sharding.offload_policy)
        torch.manual_seed(seed)
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
            pipeline_schedule=pipeline_schedule,
        )
        self._built, self._model, self._parameters = built, built.model, built.parameters
        self._done = 0
        self._saving: checkpoint.StateSave | None = None
        self._budgets = Budgets()
        self._optim = optim
        self._schedule = None if optim is None else schedule(optim, total_steps)
        self._optimizer = (
            None if optim is None else build_optimizer(self._parameters, optim, in_layers=self._built.layer_names)
        )
        self._apply_rate()
        self._passes = Passes(
            built,
            dims=dims,
            device=device,
            where=self._meshes,
            budgets=self._budgets,
            optimizer=self._optimizer,
            share_prompts=share_prompts,
        )
        self._passes.check_architecture()

    # -- forward and update -------------------------------------------------------------------------------------------

    def forward_without_adapters(
        self, rows: Batch, needs: frozenset[str], *, temperature: float, micro: MicroBatching
    ) -> dict[str, Tensor]:
        """``forward`` of the frozen base: with LoRA, the reference policy. Collective.

        Raises:
            EngineError: when the engine has no adapters.
        """
        if not self._built.adapted:
            raise EngineError("this engine trains all weights: it holds no reference policy")
        with optional.load(f"{LORA}:AdaptersOff")(self._model):
            return self.forward(rows, needs, temperature=temperature, micro=micro)

    def forward(
        self, rows: Batch, needs: frozenset[str], *, temperature: float, micro: MicroBatching
    ) -> dict[str, Tensor]:
        """Without gradient: the asked-for fields of ``Outputs`` as ``[b, T]`` float32, row order kept. Collective."""
        return self._passes.infer(rows, needs, temperature=temperature, micro=micro)

    def compare_with(self, reference: FSDPEngine) -> None:
        """From now on ``full_kl`` can be asked for: the exact KL to ``reference``, evaluated on the same micro-batches.

        ``reference`` is another engine in this process, or with LoRA this one: its base without adapters.

        Raises:
            ConfigError: when the two do not hold the same tokens, layers and slices of the vocabulary.
        """
        ours, theirs = self.dims, reference.dims
        if (ours.tp, ours.sp, ours.pp) != (theirs.tp, theirs.sp, theirs.pp):
            raise ConfigError(
                f"the exact KL needs both models on the same ranks, cut in the same way: the policy has tp {ours.tp} x "
                f"sp {ours.sp} x pp {ours.pp}, the reference tp {theirs.tp} x sp {theirs.sp} x pp {theirs.pp}"
            )
        self._passes.compare_with(reference._passes)

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
        sums, void = self._passes.train(rows, loss, temperature=temperature, micro=micro, counts=counts)
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

    def _settled_norm(self) -> Tensor:
        """Finishes the gradient's reduction and returns its global norm. Collective."""
        settle_gradients(self._parameters.values())
        counted = dict(self._parameters)
        if self._built.pipeline is not None and self._built.tied_ends:
            grad = self._parameters[EMBEDDING].grad if EMBEDDING in self._parameters else None
            if grad is not None:
                self._built.pipeline.sum_tied(local_of(grad))
            if not self._model.first:
                counted.pop(EMBEDDING, None)
        return gradient_norm(counted.values(), self._meshes.pp)

    def counts(self, rows: Batch) -> Counts:
        """Counts of a mini-batch summed over data-parallel ranks. Collective."""
        return reduction.count(rows, self.dims, self._device)

    def _reshard(self) -> None:
        self._passes.reshard()

    # -- what it costs ------------------------------------------------------------------------------------------------

    def work(self) -> Work:
        """What forwards and updates have computed since the last call, over all ranks. Collective."""
        return self._built.meter.take()

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
        return self._blocks(self._built.shapes, self._merged())

    def base_shards(self) -> Sequence[Shard]:
        """``shards`` of the frozen base: with LoRA, without the adapters."""
        self._reshard()
        return self._blocks(self._built.shapes, {})

    def adapter_shards(self) -> Sequence[Shard]:
        """This rank's blocks of LoRA's A and B, in one order on all ranks; empty without adapters."""
        self._reshard()
        return self._blocks(self._built.adapter_shapes, {})

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
        if not self._built.adapted:
            return {}
        return optional.load(f"{LORA}:merged_blocks")(self._model, self._parameters)

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape by Hugging Face name, in the order of ``shards``."""
        return dict(self._built.shapes)

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
            {"schedule_done": self._done, "budgets": self._budgets.state_dict()},
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
        if not self._built.adapted:
            return self._parameters
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def load(self, folder: str, *, contents: Sequence[str] = checkpoint.ALL) -> None:
        """Restores what ``save`` wrote, at any layout. Collective."""
        self._reshard()
        extra = checkpoint.load_state(folder, self._trained(), self._optimizer, contents=contents)
        if "extra" in contents:
            self._done = int(extra["schedule_done"])
            self._budgets.load_state_dict(extra.get("budgets", {}))
        self._apply_rate()

    def save_hf(self, folder: str, *, dtype: str | None = None) -> None:
        """Writes a Hugging Face folder that ``from_pretrained`` reads; None: in the dtype of the master weights.

        Experts are stored as in the folder that they came from: stacked, or one by one. Collective.
        """
        self._reshard()
        own, merged = self._parameters, self._merged()
        checkpoint.save_hf(
            folder,
            {name: placed_like(merged[name], held) if name in merged else held for name, held in own.items()}
            | dict(self._built.buffers),
            self._model.net.config,
            names=[*self._built.shapes, *self._built.buffers],
            by_expert=self._built.by_expert,
            stages=self._meshes.pp,
            source=self._config.path,
            dtype=None if dtype is None else dtype_of(dtype),
        )

    def save_adapters(self, folder: str) -> None:
        """Writes the adapters as PEFT does; ``model.lora_adapter_path`` and PEFT read them. Collective.

        Raises:
            EngineError: when the engine has no adapters.
        """
        if not self._built.adapted:
            raise EngineError("this engine trains all weights: it has no adapters to save")
        self._reshard()
        checkpoint.save_adapters(
            folder,
            self._parameters,
            optional.load(f"{LORA}:adapter_config")(self._model, self._config.path),
            names=list(self._built.adapter_shapes),
            stages=self._meshes.pp,
        )
