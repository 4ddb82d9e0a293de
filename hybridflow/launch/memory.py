"""A rough estimate of what one device holds, role by role. It is there to catch a wrong order of magnitude.

Parameters, gradients and optimizer states are exact for AdamW. Activations count the tensors that autograd keeps of a
decoder layer; log-probs are computed in chunks, so logits never stand there for all tokens at once.
"""

from __future__ import annotations

from dataclasses import replace

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.config.root import PPOConfig
from hybridflow.launch.hf_model import ModelFacts
from hybridflow.launch.machine import Machine
from hybridflow.launch.plan import BatchPlan, Device, MemoryLine, MicroPlan, RolePlan

LOGIT_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once."""
KV_BLOCK_TOKENS = 128
"""Tokens of one block of the CPU engine's cache; a sequence takes whole blocks."""
_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}


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
        "actor": (policy.model, policy.actor.fsdp_config),
        "reference": (policy.model, policy.ref.fsdp_config),
        "critic": (config.critic.model, config.critic.fsdp),
        "cost_critic": (config.critic.model, config.critic.fsdp),
        "reward": (config.reward.reward_model.model, config.reward.reward_model.fsdp_config),
    }
    lines = []
    for role in roles:
        calls = [micro for micro in batch.micro if micro.role == role.role]
        if role.role == "rollout":
            lines.append(_generator(config, role, batch, model, machine, device))
        elif calls:
            line = _trained(role, calls, *sections[role.role], batch=batch, model=model)
            lines.append(replace(line, resident={}) if _reads_the_actor(config, role, roles) else line)
    return tuple(lines)


def _reads_the_actor(config: PPOConfig, role: RolePlan, roles: tuple[RolePlan, ...]) -> bool:
    """Whether this is a reference that holds nothing: with LoRA it is the actor without adapters (its worker)."""
    if role.role != "reference" or config.actor_rollout_ref.model.lora_rank == 0:
        return False
    return any(other.role == "actor" and (other.pool, other.dims) == (role.pool, role.dims) for other in roles)


def _trained(
    role: RolePlan,
    calls: list[MicroPlan],
    settings: ModelConfig,
    sharding: FSDPConfig,
    *,
    batch: BatchPlan,
    model: ModelFacts,
) -> MemoryLine:
    dims = role.dims
    trains = any(call.call.startswith("update") for call in calls)
    split = dims.dp_shard * dims.sp * dims.tp * dims.pp
    master, compute = _BYTES[sharding.model_dtype], _BYTES[sharding.mixed_precision.param_dtype]
    parameters = model.parameters * master // split
    layer = (model.parameters - model.vocabulary * model.hidden) // model.layers * compute // dims.tp
    whole = model.parameters * compute // (dims.tp * dims.pp)
    alone = split == dims.tp * dims.pp
    if alone:
        gathered = whole if compute != master else 0
    else:
        gathered = 2 * layer if sharding.reshard_after_forward else whole
    trained = _adapters(model, settings.lora_rank) * master // split if settings.lora_rank else parameters
    tokens = max(_tokens(call, batch) for call in calls) // dims.sp
    training_tokens = (
        max((_tokens(call, batch) for call in calls if call.call.startswith("update")), default=0) // dims.sp
    )
    kept = (
        training_tokens
        * _kept_per_token(model, settings.enable_gradient_checkpointing)
        * compute
        // (dims.tp * dims.pp)
    )
    logits = (
        0 if role.role.endswith("critic") else min(tokens, LOGIT_CHUNK_TOKENS) * model.vocabulary * 4 * 2 // dims.tp
    )
    resident = {"parameters": parameters} | ({"optimizer": 2 * trained} if trains else {})
    peak = {"gathered layers": gathered, "activations": kept, "logits": logits}
    return MemoryLine(
        role=role.role, pool=role.pool, resident=resident, peak=peak | ({"gradients": trained} if trains else {})
    )


def _adapters(model: ModelFacts, rank: int) -> int:
    """Parameters of LoRA adapters on all linear layers."""
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 2 * (model.hidden + heads) + 2 * (model.hidden + kv_heads)
    return model.layers * rank * (attention + 3 * (model.hidden + model.intermediate))


def _tokens(call: MicroPlan, batch: BatchPlan) -> int:
    """Tokens of the largest micro-batch of a call."""
    longest = batch.prompt_length + batch.response_length
    everything = call.rows_per_coordinate * longest
    return min(call.max_tokens if call.max_tokens is not None else (call.max_rows or 1) * longest, everything)


def _kept_per_token(model: ModelFacts, checkpointing: bool) -> int:
    """Numbers that autograd keeps per token."""
    of_layer = 8 * model.hidden + 3 * model.intermediate + 2 * model.head_dim * (model.heads + model.kv_heads)
    return model.layers * model.hidden + of_layer if checkpointing else model.layers * of_layer


def _generator(
    config: PPOConfig, role: RolePlan, batch: BatchPlan, model: ModelFacts, machine: Machine, device: Device
) -> MemoryLine:
    rollout = config.actor_rollout_ref.rollout
    tp = role.dims.tp
    weights = model.parameters * _BYTES[rollout.dtype] // tp
    buckets = 2 * (rollout.checkpoint_engine.update_weights_bucket_megabytes << 20)
    if device == "cuda" and machine.gpus:
        cache = max(0, int(machine.gpus[0].memory_bytes * rollout.gpu_memory_utilization) - weights)
    elif rollout.kv_cache_memory_bytes is not None:
        cache = rollout.kv_cache_memory_bytes
    else:
        per_token = 2 * model.layers * max(1, model.kv_heads // tp) * model.head_dim * _BYTES[rollout.dtype]
        sequences = min(rollout.max_num_seqs, -(-batch.sequences // role.dims.dp))
        cache = sequences * -(-batch.model_length // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS * per_token
    buckets = min(buckets, 2 * weights)
    resident = {"generator weights": weights} | (
        {} if rollout.free_cache_engine and config.rollout_shares_devices and device == "cuda" else {"KV cache": cache}
    )
    peak = {"transfer buffers": buckets} | ({"KV cache": cache} if "KV cache" not in resident else {})
    return MemoryLine(role=role.role, pool=role.pool, resident=resident, peak=peak)
