"""An estimate of what one device holds, by role and phase, in bytes. Peaks are measured against it in
``tests/integration/test_memory_estimate.py``.

Parameters, gradients and optimizer states are exact for AdamW. A call's own memory is that of its worst moment:

    forward    one layer at work on a micro-batch, or the head: two blocks of float32 logits
    update     (a) the head's backward: what autograd keeps of all layers, log p and its gradient, the head's gradient,
                   and what earlier micro-batches have left of gradients
               (b) a layer that is computed again, where activations are checkpointed
               (c) the end of the backward: all gradients, one layer, and the embedding's gradient before it is added
    generate   one step of the engine: its tokens through a layer, the logits of all sequences
    publish    two buckets

Of the stages of a pipeline the one is meant whose device holds most. Lengths are the longest that the configuration
allows. Rows that share a prompt bring it once; on a CPU and on a GPU alike attention copies the prompt's keys and
values before those of each branch. On a GPU what a role keeps in host memory while it is idle (``param_offload``,
``optimizer_offload``) counts in its calls only, and what is kept there at all times (``offload_policy``, saved
activations) not at all. On a CPU device and host are one memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.config.root import PPOConfig
from hybridflow.launch.hf_model import ModelFacts, read_model
from hybridflow.launch.machine import Machine
from hybridflow.launch.plan import BatchPlan, Device, MemoryLine, MicroPlan, RolePlan
from hybridflow.utils.errors import MachineError

LOGITS_KEPT_BYTES = 512 << 20
"""Log-probs of a micro-batch over the vocabulary are kept up to here, else computed again (models/logprobs.py)."""
LOGITS_BLOCK_BYTES = 32 << 20
"""float32 logits of one block of rows."""
SMALL_VOCABULARY = 1024
"""Up to here logits are neither cut into blocks nor computed again."""
BACKWARD_BLOCKS = 4
"""Blocks that the backward pass computes again at once."""
KV_BLOCK_TOKENS = 128
"""Tokens of one block of the CPU engine's cache; a sequence takes whole blocks."""
_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_REDUCED = 4
"""Bytes of a gradient that FSDP holds before it is reduced."""


def estimate(
    config: PPOConfig,
    roles: tuple[RolePlan, ...],
    batch: BatchPlan,
    model: ModelFacts,
    machine: Machine,
    device: Device,
) -> tuple[MemoryLine, ...]:
    """One line per role that holds tensors."""
    policy = config.actor_rollout_ref
    sections: dict[str, tuple[ModelConfig, FSDPConfig]] = {
        "actor": (policy.model, policy.actor.sharding),
        "reference": (policy.model, policy.ref.sharding),
        "critic": (config.critic.model, config.critic.sharding),
        "cost_critic": (config.critic.model, config.critic.sharding),
        "reward_model": (config.reward.reward_model.model, config.reward.reward_model.sharding),
    }
    calls = {role.role: [micro for micro in batch.micro if micro.role == role.role] for role in roles}
    trained = {
        role.role: _fullest(
            [
                _Trained(
                    role,
                    *sections[role.role],
                    stage=stage,
                    batch=batch,
                    model=_facts(sections[role.role][0], model),
                    config=config,
                    device=device,
                )
                for stage in range(role.dims.pp)
            ],
            calls[role.role],
        )
        for role in roles
        if role.role in sections and calls[role.role]
    }
    lines = []
    for role in roles:
        if role.role == "rollout":
            sends = trained["actor"].at_publish() if config.rollout_shares_devices else {}
            lines.append(_generator(config, role, batch, model, machine, device, sends))
        elif role.role in trained:
            line = trained[role.role].line(calls[role.role])
            lines.append(replace(line, resident={}) if _reads_the_actor(config, role, roles) else line)
    return tuple(lines)


def _facts(model: ModelConfig, policy: ModelFacts) -> ModelFacts:
    """Of ``model``; the policy's where it has no folder, or one that cannot be read (check_machine says so)."""
    try:
        return policy if model.path is None else read_model(model.path, model.override_config) or policy
    except MachineError:
        return policy


def _reads_the_actor(config: PPOConfig, role: RolePlan, roles: tuple[RolePlan, ...]) -> bool:
    """Whether this is a reference that holds nothing: with LoRA it is the actor without adapters (its worker)."""
    if role.role != "reference" or config.actor_rollout_ref.model.lora_rank == 0:
        return False
    return any(other.role == "actor" and (other.pool, other.dims) == (role.pool, role.dims) for other in roles)


def _fullest(stages: list[_Trained], calls: list[MicroPlan]) -> _Trained:
    """The pipeline stage whose device holds most at its worst moment."""
    return max(stages, key=lambda stage: stage.most(calls))


class _Trained:
    """The memory of a role that runs on the training engine, on a device of pipeline stage ``stage``."""

    def __init__(
        self,
        role: RolePlan,
        settings: ModelConfig,
        sharding: FSDPConfig,
        *,
        stage: int,
        batch: BatchPlan,
        model: ModelFacts,
        config: PPOConfig,
        device: Device,
    ) -> None:
        dims = role.dims
        self._role = role
        self._batch = batch
        self._model = model
        self._together = batch.samples_per_prompt if config.shares_prompts(role.role) else 1
        self._checkpointing = settings.gradient_checkpointing_mode if settings.enable_gradient_checkpointing else None
        host = device == "cuda"
        self._parks_activations = host and settings.enable_activation_offload
        self._lives_on_host = host and sharding.offload_policy
        moved = {"parameters": sharding.param_offload, "optimizer": sharding.optimizer_offload}
        self._moves = frozenset(what for what, moves in moved.items() if host and moves)
        sections = {"actor": config.actor_rollout_ref.actor, "critic": config.critic, "cost_critic": config.critic}
        self._schedule = sections[role.role].pipeline_schedule if role.role in sections else "1f1b"
        self._entropy = role.role == "actor" and config.actor_rollout_ref.actor.entropy_coeff != 0
        self._master = _BYTES[sharding.model_dtype]
        self._compute = _BYTES[sharding.mixed_precision.param_dtype]
        self._reads_words = not role.role.endswith("critic") and role.role != "reward_model"
        shards = dims.dp_shard * dims.sp
        # As engines/train: on one shard there is nothing to give back, under a pipeline nothing is.
        self._reshards = sharding.reshard_after_forward and shards > 1 and dims.pp == 1
        self._fsdp = shards * dims.dp_replicate > 1 or self._compute != self._master or self._lives_on_host
        self._stage = stage
        self._last = stage == dims.pp - 1
        self._layers = (stage + 1) * model.layers // dims.pp - stage * model.layers // dims.pp
        # Tables of vocabulary x hidden: the embedding, and the output layer, where that is not the embedding itself.
        self._has_head = self._last and self._reads_words
        self._tables = (stage == 0) + (self._has_head and (dims.pp > 1 or not model.tied))
        self._embedding = model.vocabulary * model.hidden // dims.tp if self._tables else 0
        outside = model.vocabulary * model.hidden * (1 if model.tied else 2)
        self._sizes = (model.parameters - outside) * self._layers // model.layers
        self._sizes += self._tables * model.vocabulary * model.hidden
        self._parameters = self._sizes * self._master // (shards * dims.tp)
        adapters = _adapters(model, settings.lora_rank) * self._layers // model.layers
        self._gradients = adapters * self._master // (shards * dims.tp) if settings.lora_rank else self._parameters
        self._full_gradients = (adapters or self._sizes) * _REDUCED // dims.tp
        self._trains_embedding = not settings.lora_rank
        merges = bool(settings.lora_rank) and settings.lora_merge
        adapted = _adapted(model) * self._layers // model.layers
        self._merged = adapted * self._master // (shards * dims.tp) if merges else 0

    def most(self, calls: list[MicroPlan]) -> int:
        """Bytes at the worst moment of ``calls``."""
        line = self.line(calls)
        return sum(line.resident.values()) + sum(line.peak.values())

    def line(self, calls: list[MicroPlan]) -> MemoryLine:
        """What it holds, and what each of ``calls`` adds."""
        trains = any(call.call.startswith("update") for call in calls)
        adapters = 0 if self._trains_embedding or not trains else self._gradients
        held = {"parameters": self._parameters + adapters} | ({"optimizer": 2 * self._gradients} if trains else {})
        held = {} if self._lives_on_host else held
        called = {name: size for name, size in held.items() if name in self._moves}
        phases = {
            call.call: {**called, **(self._update(call) if call.call.startswith("update") else self._forward(call))}
            for call in calls
        }
        resident = {name: size for name, size in held.items() if name not in called}
        return MemoryLine(role=self._role.role, pool=self._role.pool, resident=resident, phases=phases)

    def at_publish(self) -> Mapping[str, int]:
        """What it brings to the device while its weights travel: those that waited in host memory, merged ones."""
        parked = {"parameters": self._parameters} if "parameters" in self._moves else {}
        return parked | ({"merged weights": self._merged} if self._merged else {})

    def _forward(self, call: MicroPlan) -> Mapping[str, int]:
        tokens, read, copied = self._tokens(call)
        model, tp = self._model, self._role.dims.tp
        heads, kv = model.heads * model.head_dim // tp, max(1, model.kv_heads // tp) * model.head_dim
        # Embeddings, residual stream twice and a normalised copy; cosines and sines; the wider of both blocks.
        around = 4 * model.hidden + 2 * model.head_dim
        attention = tokens * (4 * heads + 2 * kv) + copied * 2 * kv
        at_work = (tokens * around + max(tokens * 3 * model.intermediate // tp, attention)) * self._compute
        hidden = (tokens + read * self._last) * model.hidden * self._compute
        logits = 2 * self._block(read)
        gathered = {"gathered layers": self._gathered()} if self._fsdp else {}
        if hidden + logits > at_work:
            return gathered | {"activations": hidden, "logits": logits}
        return gathered | {"activations": at_work}

    def _update(self, call: MicroPlan) -> Mapping[str, int]:
        tokens, read, copied = self._tokens(call)
        model, in_flight = self._model, self._in_flight(call)
        kv = model.kv_heads * model.head_dim // self._role.dims.tp
        of_layer = tokens * self._kept_of_layer() + copied * 2 * kv * self._compute
        states = tokens * model.hidden * self._compute
        kept = self._layers * (tokens * self._kept_by_checkpoint() if self._checkpointing else of_layer) * in_flight
        kept = 0 if self._parks_activations else kept
        if self._last:
            kept += in_flight * (3 * states + 2 * read * model.hidden * self._compute)
        else:  # what came in and what went out, of every micro-batch whose backward is to come
            kept += in_flight * 2 * states
        kept += self._messages(call) * states
        several = self._largest(call)[0] < call.rows_per_coordinate
        # Summed in float32 where logits are computed again block by block.
        recomputed = read * model.vocabulary * 4 // self._role.dims.tp > LOGITS_KEPT_BYTES
        trains_head = self._has_head and self._trains_embedding
        head = self._embedding * (4 if recomputed else self._compute) if trains_head else 0
        gathered = {"gathered layers": self._gathered()} if self._fsdp else {}
        own = 0 if self._lives_on_host else self._gradients
        before = (self._full_gradients if self._fsdp else own) if several else 0
        at_head = {"activations": kept, "logits": self._logits(read), "head gradient": head, "gradients": before}
        again = of_layer if self._checkpointing else 0
        at_layer = {"activations": kept + again, "head gradient": head, "gradients": before}
        # The embedding's gradient is added to what the head or an earlier micro-batch has left.
        embeds = self._stage == 0 and self._trains_embedding
        added = self._embedding * self._master if embeds and (head or several) else 0
        unreduced = self._unreduced(several) if self._fsdp else 0
        at_end = {"activations": of_layer, "embedding gradient": added, "gradients": own + unreduced}
        return gathered | max(at_head, at_layer, at_end, key=lambda parts: sum(parts.values()))

    def _in_flight(self, call: MicroPlan) -> int:
        """Micro-batches of which this stage holds activations at once."""
        count = self._micro_batches(call)
        return count if self._schedule == "torch_gpipe" else min(count, self._role.dims.pp - self._stage)

    def _micro_batches(self, call: MicroPlan) -> int:
        return -(-call.rows_per_coordinate // self._largest(call)[0])

    def _messages(self, call: MicroPlan) -> int:
        """Hidden states for which torch's schedules make room in advance: all that this stage receives."""
        if self._schedule == "1f1b":
            return 0
        return self._micro_batches(call) * ((self._stage > 0) + (not self._last))

    def _kept_by_checkpoint(self) -> int:
        """Bytes per token that a checkpointed layer keeps for its recomputation."""
        model, tp = self._model, self._role.dims.tp
        if self._checkpointing == "full":
            return model.hidden * self._compute
        heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        cut = (2 * heads + 2 * kv + 2 * model.intermediate) * self._compute + 4 * model.heads
        return 3 * model.hidden * self._compute + cut // tp

    def _kept_of_layer(self) -> int:
        """Bytes per token that autograd keeps of one layer."""
        model, dims = self._model, self._role.dims
        heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        # Each norm: its input, the normalised input, its output; in half precision also a float32 copy of the input.
        norms = 2 * model.hidden * (3 * self._compute if self._compute == 4 else 2 * self._compute + 4)
        attention = (3 * heads + 2 * kv) * self._compute + 4 * model.heads
        if model.kind == "qwen3":
            attention += 2 * (heads + kv) * self._compute
        return (norms + attention + 4 * model.intermediate * self._compute) // dims.tp

    def _logits(self, read: int) -> int:
        """Worst moment of log-probs with a gradient: log p, its gradient, and with entropy a share of it."""
        if not self._has_head:
            return 0
        copies = 3 if self._entropy else 2
        whole = read * self._model.vocabulary * 4 // self._role.dims.tp
        if self._words_are_few:
            return (copies + 1) * whole
        return copies * (whole if whole <= LOGITS_KEPT_BYTES else min(whole, BACKWARD_BLOCKS * LOGITS_BLOCK_BYTES))

    def _block(self, read: int) -> int:
        if not self._has_head:
            return 0
        whole = read * self._model.vocabulary * 4 // self._role.dims.tp
        return whole if self._words_are_few else min(whole, LOGITS_BLOCK_BYTES)

    @property
    def _words_are_few(self) -> bool:
        return self._role.dims.tp == 1 and self._model.vocabulary <= SMALL_VOCABULARY

    def _gathered(self) -> int:
        """What FSDP has gathered at once: the root (embedding and head), and the layer at work with the next one."""
        whole = self._sizes * self._compute // self._role.dims.tp
        if not self._reshards:
            return whole
        return min(whole, (self._tables * self._embedding + 2 * self._layer()) * self._compute)

    def _unreduced(self, several: bool) -> int:
        """Gradients that FSDP has not reduced yet at the end of the last backward."""
        if several:
            return self._full_gradients
        return min(self._full_gradients, (self._embedding + 2 * self._layer()) * _REDUCED)

    def _layer(self) -> int:
        model = self._model
        outside = model.vocabulary * model.hidden * (1 if model.tied else 2)
        return (model.parameters - outside) // model.layers // self._role.dims.tp

    def _largest(self, call: MicroPlan) -> tuple[int, int]:
        """Rows of the largest micro-batch, and prompts that they bring."""
        prompt, response, together = self._batch.prompt_length, self._batch.response_length, self._together
        if call.max_tokens is None:
            rows = call.max_rows or 1
        elif call.max_tokens >= prompt + together * response:
            rows = call.max_tokens // (prompt + together * response) * together
        else:  # the rows of a prompt are cut: as many as fit behind it
            rows = max(1, (call.max_tokens - prompt) // response)
        rows = min(rows, call.rows_per_coordinate)
        return rows, -(-rows // together)

    def _tokens(self, call: MicroPlan) -> tuple[int, int, int]:
        """Tokens of the largest micro-batch on one device, how many of them the head reads, and tokens of prompts whose
        keys and values are copied for the branches behind them.
        """
        rows, prompts = self._largest(call)
        prompt, response, sp = self._batch.prompt_length, self._batch.response_length, self._role.dims.sp
        copied = rows * prompt // sp if self._together > 1 else 0
        return (prompts * prompt + rows * response) // sp, rows * response // sp, copied


def _adapted(model: ModelFacts) -> int:
    """Parameters of all linear layers inside the body: those that have adapters."""
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return model.layers * model.hidden * (2 * heads + 2 * kv_heads + 3 * model.intermediate)


def _adapters(model: ModelFacts, rank: int) -> int:
    """Parameters of LoRA adapters on all linear layers."""
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 2 * (model.hidden + heads) + 2 * (model.hidden + kv_heads)
    return model.layers * rank * (attention + 3 * (model.hidden + model.intermediate))


@dataclass(frozen=True, slots=True)
class _Cache:
    """Keys and values of a generator."""

    held: int
    """Bytes reserved from the start."""
    grown: int
    """Bytes that it takes while it generates."""


def _generator(
    config: PPOConfig,
    role: RolePlan,
    batch: BatchPlan,
    model: ModelFacts,
    machine: Machine,
    device: Device,
    sends: Mapping[str, int],
) -> MemoryLine:
    """``sends``: what the actor brings to the same device for a publish."""
    rollout = config.actor_rollout_ref.rollout
    tp, item = role.dims.tp, _BYTES[rollout.dtype]
    weights = model.parameters * item // tp
    sequences = min(rollout.max_num_seqs, -(-batch.sequences // role.dims.dp))
    tokens = min(rollout.max_num_batched_tokens, sequences * batch.prompt_length)
    at_work = tokens * (2 * model.hidden + 3 * model.intermediate // tp) * item
    logits = 3 * sequences * model.vocabulary * 4
    alone = role.dims.world == 1 and config.rollout_shares_devices
    buckets = 0 if alone else min(2 * (rollout.checkpoint_engine.update_weights_bucket_megabytes << 20), 2 * weights)
    cache = _cache(config, role, batch, model, machine, device, sequences=sequences, weights=weights)
    resident = {"generator weights": weights} | ({"KV cache": cache.held} if cache.held else {})
    trained, merging = config.actor_rollout_ref.model, 0
    if trained.lora_rank and not trained.lora_merge:  # what adapters are merged into, and the adapters (float32)
        resident["kept base"] = (_adapted(model) * item + _adapters(model, trained.lora_rank) * 4) // tp
        largest = model.hidden * max(model.intermediate, model.heads * model.head_dim) // tp
        merging = min(rollout.checkpoint_engine.update_weights_bucket_megabytes << 20, 2 * 4 * largest)
    phases = {
        "generate_sequences": ({"KV cache": cache.grown} if cache.grown else {})
        | {"activations": at_work, "logits": logits},
        "publish": {"transfer buffers": buckets, **({"merging": merging} if merging else {}), **sends},
    }
    return MemoryLine(role=role.role, pool=role.pool, resident=resident, phases=phases)


def _cache(
    config: PPOConfig,
    role: RolePlan,
    batch: BatchPlan,
    model: ModelFacts,
    machine: Machine,
    device: Device,
    *,
    sequences: int,
    weights: int,
) -> _Cache:
    rollout = config.actor_rollout_ref.rollout
    if device == "cuda" and machine.gpus:
        share = max(0, int(machine.gpus[0].memory_bytes * rollout.gpu_memory_utilization) - weights)
        frees = rollout.free_cache_engine and config.rollout_shares_devices
        return _Cache(0, share) if frees else _Cache(share, 0)
    heads = max(1, model.kv_heads // role.dims.tp)
    per_token = 2 * model.layers * heads * model.head_dim * _BYTES[rollout.dtype]
    if rollout.name == "hf":  # grows with the sequences; while one layer's grows, it is there twice
        return _Cache(0, sequences * batch.model_length * per_token * (model.layers + 1) // model.layers)
    if rollout.kv_cache_memory_bytes is not None:
        return _Cache(rollout.kv_cache_memory_bytes, 0)
    return _Cache(sequences * -(-batch.model_length // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS * per_token, 0)
