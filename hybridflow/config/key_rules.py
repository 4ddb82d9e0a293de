"""verl's keys that are no leaf of ours: another spelling, taken without effect, or refused with what to use instead.

A pattern is a dotted key; ``*`` stands for one part, a last ``**`` for one or more. The first pattern that fits
decides. Public scripts of verl set some three hundred keys (``config/verl_keys.py``); every one of them is a leaf or
fits a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

POLICY = "actor_rollout_ref"
PROFILE = "use profiler.steps=[1,2] (and profiler.roles, ranks, contents): torch.profiler records those steps"
ENGINE = "use the native engine: *.strategy=fsdp2 with tensor_, pipeline_ and ulysses_sequence_parallel_size"
TEXT_ONLY = "models and prompts are text only; remove the key"
ONE_BLOCK = "use 1: a rank holds one block of layers (docs/design/0012-pipeline-schedules.md)"
FORWARDS = "remove the key: forward passes run micro-batch by micro-batch, at any length"
MULTI_TURN = "use single-turn prompts; tools and several turns are not part of this version"
QLORA = (
    "use model.lora_rank over a base of plain weights (fsdp_config.model_dtype=bf16 halves it): QLoRA is not "
    "supported, since 4-bit blocks can neither be sharded nor be merged and published slice by slice"
)
JUDGE = (
    "use reward.reward_model.micro_batch_size_per_gpu: a reward model runs on the training engine; "
    "call a judge that generates text from reward.custom_reward_function"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to the keys of one pattern."""

    pattern: str
    text: str
    """Taken: what holds in its place. Refused: what to use instead."""
    to: str | None = None
    """Another spelling of this key; a last ``**`` carries the rest over."""
    values: tuple[Any, ...] | None = ()
    """Values taken without effect; None: any. null is always taken, it means *not set*."""
    same_as: str | None = None
    """Taken when it equals the value of this key."""

    @property
    def honoured(self) -> bool:
        """Whether the key is a spelling of ours, or its common values are taken."""
        return self.to is not None or self.same_as is not None or self.values != ()


def renamed(pattern: str, to: str) -> Rule:
    """Another spelling of ``to``."""
    return Rule(pattern=pattern, to=to, text=f"another spelling of {to}")


def taken(pattern: str, text: str, values: tuple[Any, ...] | None = None) -> Rule:
    """Taken without effect for ``values`` (None: any); others are refused with ``text``."""
    return Rule(pattern=pattern, text=text, values=values)


def refused(pattern: str, text: str) -> Rule:
    """Refused whatever the value."""
    return Rule(pattern=pattern, text=text)


def _policy() -> Iterator[Rule]:
    model = f"{POLICY}.model"
    yield taken(f"{model}.use_shm", "copy the folder to /dev/shm and give that path as model.path", (False,))
    yield taken(f"{model}.use_fused_kernels", "log-probs and entropy never hold all logits in float32", None)
    yield taken(f"{model}.fused_kernel_options.impl_backend", "log-probs are one torch function", ("torch", "triton"))
    for at in (model, "critic.model"):
        for name in ("load_in_4bit", "load_in_8bit"):
            yield taken(f"{at}.{name}", QLORA, (False,))
        for name in ("quantization", "quantization_config", "quantization_config.**", "qlora", "use_qlora"):
            yield refused(f"{at}.{name}", QLORA)
    yield renamed(f"{model}.torch_dtype", f"{POLICY}.actor.fsdp_config.model_dtype")
    yield renamed(f"{model}.lora.merge", f"{model}.lora_merge")
    for name in ("rank", "alpha"):
        yield renamed(f"{model}.lora.{name}", f"{model}.lora_{name}")
    for name in ("target_modules", "exclude_modules"):
        yield renamed(f"{model}.lora.{name}", f"{model}.{name}")
    yield renamed(f"{model}.lora.adapter_path", f"{model}.lora_adapter_path")
    yield refused(f"{model}.external_lib", f"use {model}.trust_remote_code for code that comes with the model")
    for role in ("actor", "ref"):
        at = f"{POLICY}.{role}"
        for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing"):
            yield renamed(f"{at}.{name}", f"{at}.fsdp_config.{name}")
        yield renamed(f"{at}.fsdp_config.ulysses_sequence_parallel_size", f"{at}.ulysses_sequence_parallel_size")
        yield refused(f"{at}.fsdp_config.wrap_policy.**", "every decoder layer is one FSDP unit; remove the key")
        yield taken(f"{at}.virtual_pipeline_parallel_size", ONE_BLOCK, (1,))
    yield taken(f"{POLICY}.ref.pipeline_schedule", FORWARDS, ("1f1b",))
    actor = f"{POLICY}.actor"
    yield refused(f"{actor}.ppo_micro_batch_size", f"use {actor}.ppo_micro_batch_size_per_gpu (sequences per device)")
    yield taken(f"{actor}.calculate_sum_pi_squared", "it follows from algorithm.adv_estimator", None)
    yield taken(f"{actor}.pad_to_length", "rows are packed, never padded; remove the key", (False,))
    yield taken(f"{actor}.freeze_vision_tower", TEXT_ONLY, (False,))
    yield renamed(f"{actor}.checkpoint.contents", f"{actor}.checkpoint.save_contents")
    yield renamed(f"{actor}.optim.warmup_style", f"{actor}.optim.lr_scheduler_type")
    yield taken(f"{actor}.optim.total_training_steps", "use trainer.total_training_steps", (-1,))
    yield taken(f"{actor}.router_replay.mode", "use models without experts; remove the key", ("disabled",))


def _rollout() -> Iterator[Rule]:
    rollout = f"{POLICY}.rollout"
    for at in (rollout, f"{POLICY}.ref"):
        per_device = f"{at}.log_prob_micro_batch_size_per_gpu"
        yield refused(f"{at}.log_prob_micro_batch_size", f"use {per_device} (sequences per device)")
    yield taken(f"{rollout}.expert_parallel_size", f"use {rollout}.tensor_model_parallel_size", (1,))
    yield taken(f"{rollout}.enable_rollout_routing_replay", "use models without experts; remove the key", (False,))
    yield taken(f"{rollout}.multi_stage_wake_up", "weights wake before the KV cache in any case", None)
    captured = f"{rollout}.engine_kwargs.vllm.compilation_config.cudagraph_capture_sizes"
    yield renamed(f"{rollout}.cudagraph_capture_sizes", captured)
    yield renamed(f"{rollout}.engine_kwargs.vllm.max_model_len", f"{rollout}.max_model_len")
    for name in ("disable_mm_preprocessor_cache", "mm_processor_cache_gb", "limit_mm_per_prompt"):
        yield refused(f"{rollout}.engine_kwargs.vllm.{name}", TEXT_ONLY)
    yield renamed(f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes", f"{rollout}.kv_cache_memory_bytes")
    for name in ("sglang", "trtllm"):
        yield refused(f"{rollout}.engine_kwargs.{name}.**", f"use {rollout}.name=vllm and engine_kwargs.vllm")
    yield taken(f"{rollout}.multi_turn.enable", MULTI_TURN, (False,))
    for name in ("multi_turn", "agent", "skip"):
        yield refused(f"{rollout}.{name}.**", MULTI_TURN)
    yield refused(f"{rollout}.trace.**", "use trainer.rollout_data_dir=FOLDER: every sample is written there")
    yield refused(f"{rollout}.quantization", "use actor_rollout_ref.rollout.dtype: weights are written slice by slice")
    yield refused(f"{rollout}.prometheus.**", "use trainer.logger: throughput is a metric of every step")


def _critic() -> Iterator[Rule]:
    for at in ("critic.model.fsdp_config", "critic.fsdp", "critic.fsdp_config"):
        yield renamed(f"{at}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size")
    yield renamed("critic.model.fsdp_config.**", "critic.fsdp.**")
    yield renamed("critic.fsdp_config.**", "critic.fsdp.**")
    yield refused("critic.ppo_micro_batch_size", "use critic.ppo_micro_batch_size_per_gpu (sequences per device)")
    yield refused("critic.forward_micro_batch_size", "use critic.forward_micro_batch_size_per_gpu")
    yield renamed("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu")
    yield renamed("critic.checkpoint.contents", "critic.checkpoint.save_contents")
    yield taken("critic.virtual_pipeline_parallel_size", ONE_BLOCK, (1,))
    yield renamed("critic.optim.warmup_style", "critic.optim.lr_scheduler_type")
    yield taken("critic.optim.total_training_steps", "use trainer.total_training_steps", (-1,))


def _reward() -> Iterator[Rule]:
    managers = ("naive", "dapo", "prime", "gdpo")
    manager = "one reward worker does what these do; the length penalty is reward.overlong, other scoring is a function"
    model = "reward.reward_model"
    yield renamed("custom_reward_function.**", "reward.custom_reward_function.**")
    yield taken("reward_model.reward_manager", f"{manager} in reward.custom_reward_function", managers)
    yield taken("reward.reward_manager.name", f"{manager} in reward.custom_reward_function", managers)
    yield refused("reward.reward_manager.**", "use reward.custom_reward_function for scoring of your own")
    for at in ("reward_model.reward_kwargs", "reward.reward_kwargs"):
        yield renamed(f"{at}.overlong_buffer_cfg.**", "reward.overlong.**")
        limit = "data.max_response_length"
        yield Rule(pattern=f"{at}.max_resp_len", same_as=limit, text=f"use {limit}: the penalty counts from there")
    for old in ("reward_model", model):
        yield refused(f"{old}.rollout.**", JUDGE)
        yield refused(f"{old}.micro_batch_size", f"use {model}.micro_batch_size_per_gpu (sequences per device)")
        yield taken(f"{old}.use_reward_loop", "rewards are always computed in workers of their own", None)
        yield taken(f"{old}.launch_reward_fn_async", "scoring overlaps with log-probs in any case", None)
        yield taken(f"{old}.strategy", "use fsdp2: a reward model runs on the training engine", ("fsdp", "fsdp2"))
        pools = "use trainer.pools.NAME.slots=[N] and trainer.pools.NAME.roles=[reward]"
        yield taken(f"{old}.enable_resource_pool", pools, (False,))
        for name in ("n_gpus_per_node", "nnodes"):
            yield taken(f"{old}.{name}", pools, (0,))
        yield renamed(f"{old}.model.fsdp_config.**", f"{model}.fsdp_config.**")
        yield refused(f"{old}.model.input_tokenizer", f"use {model}.model.tokenizer_path for its own tokenizer")
        yield refused(f"{old}.sandbox_fusion.**", "call the sandbox from reward.custom_reward_function")
        yield renamed(f"{old}.model_path", f"{model}.model.path")
        yield renamed(f"{old}.num_workers", "reward.num_workers")
    yield refused("reward.sandbox_fusion.**", "call the sandbox from reward.custom_reward_function")
    for name in ("enable", "micro_batch_size_per_gpu", "ulysses_sequence_parallel_size"):
        yield renamed(f"reward_model.{name}", f"{model}.{name}")
    yield renamed("reward_model.model.**", f"{model}.model.**")
    yield refused("reward_model.max_length", f"use {model}.max_token_len_per_gpu: rows are scored whole")


def _data_and_run() -> Iterator[Rule]:
    for name in ("image_key", "image_patch_size", "video_key", "return_multi_modal_inputs"):
        yield refused(f"data.{name}", TEXT_ONLY)
    yield renamed("data.tokenizer", f"{POLICY}.model.tokenizer_path")
    for name in ("return_raw_input_ids", "return_full_prompt"):
        yield taken(f"data.{name}", "token ids and the raw chat always travel with the row", (False,))
    ahead = "all prompts are tokenised before the first step, by data.filter_overlong_prompts_workers processes"
    yield taken("data.dataloader_num_workers", ahead, None)
    yield taken("data.validation_shuffle", "validation prompts keep their order", (False,))
    yield refused("data.tool_config_path", MULTI_TURN)
    yield refused("data.sampler.**", "use data.custom_cls for an order of your own")
    yield refused("data.datagen.**", "use data.custom_cls for prompts of your own")
    yield taken("algorithm.use_pf_ppo", "use algorithm.filter_groups to choose samples", (False,))
    yield refused("algorithm.pf_ppo.**", "use algorithm.filter_groups to choose samples")
    yield taken("trainer.use_legacy_worker_impl", "there is one kind of worker", None)
    yield renamed("trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations")
    yield refused("trainer.default_hdfs_dir", "use trainer.checkpoint_copy=hdfs://... (a copy of every checkpoint)")
    yield taken("trainer.remove_previous_ckpt_in_save", "use trainer.max_actor_ckpt_to_keep=1", (False,))
    yield taken("trainer.del_local_ckpt_after_load", "use trainer.max_actor_ckpt_to_keep", (False,))
    yield refused("trainer.ray_wait_register_center_timeout", "use trainer.timeouts.start_s")
    yield refused("trainer.profiler.**", PROFILE)
    yield renamed("trainer.profile_steps", "profiler.steps")
    yield renamed("global_profiler.steps", "profiler.steps")
    yield renamed("global_profiler.save_path", "profiler.save_path")
    yield taken("global_profiler.tool", PROFILE, ("torch",))
    yield taken("global_profiler.profile_continuous_steps", PROFILE, (False,))
    yield refused("global_profiler.**", PROFILE)
    transfer = "remove it: rows stay where they were produced in any case"
    yield refused("ray_kwargs.ray_init.runtime_env.env_vars.TRANSFER_QUEUE_ENABLE", transfer)
    yield refused("transfer_queue.**", transfer)
    yield renamed("ray_init.**", "ray_kwargs.ray_init.**")
    yield refused("ray_kwargs.timeline_json_file", PROFILE)


def _foreign() -> Iterator[Rule]:
    policy = tuple(f"{POLICY}.{role}" for role in ("actor", "ref", "rollout"))
    for role in (*policy, "critic", "reward_model", "reward.reward_model"):
        yield taken(f"{role}.profiler.enable", "profiler.roles names the roles that are recorded: all by default", None)
        for name in ("all_ranks", "ranks"):
            yield renamed(f"{role}.profiler.{name}", f"profiler.{name}")
        yield renamed(f"{role}.profiler.tool_config.torch.contents", "profiler.contents")
        yield taken(f"{role}.profiler.tool_config.torch.discrete", "every call has a file of its own", None)
        yield refused(f"{role}.profiler.**", PROFILE)
        for engine in ("veomni", "megatron", "torchtitan", "automodel", "mindspeed"):
            yield refused(f"{role}.{engine}.**", ENGINE)
    yield taken("distillation.enabled", "use algorithm and reward settings: there is no teacher model", (False,))
    yield refused("distillation.**", "use algorithm and reward settings: there is no teacher model")
    yield refused("npu.**", "use trainer.device=cpu or cuda")
    own = "use trainer.pools.rollout.slots=[N] and trainer.pools.rollout.roles=[rollout]"
    for at in ("rollout", f"{POLICY}.rollout"):
        for name in ("nnodes", "n_gpus_per_node"):
            yield taken(f"{at}.{name}", own, (0,))
    yield refused("async_training.**", "use trainer.pools: calls of roles on different devices overlap")
    yield taken("model_engine", ENGINE, ("dp",))


RULES: tuple[Rule, ...] = (*_policy(), *_rollout(), *_critic(), *_reward(), *_data_and_run(), *_foreign())
