"""Allowed names, as literals: the config loader, the docs and the registries all agree on these.

``tests/unit/config/test_choices.py`` asserts that each tuple equals the registry it stands for. A value that contains a
dot or a colon is a user's own object (``package.module:attribute``) wherever a registry says it is open.
"""

from __future__ import annotations

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "gdpo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "sapo",
    "cispo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "dppo_tv",
    "dppo_kl",
    "reinforce",
)
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_TYPES = (
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "full",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
    "full+",
)
EXACT_KL = ("full", "full+")
"""KL types over the whole vocabulary."""
KL_CONTROLLERS = ("fixed", "adaptive")
TRAIN_STRATEGIES = ("fsdp", "fsdp2")
"""Both names mean the one native FSDP2 engine; verl's scripts say either."""
ROLLOUT_ENGINES = ("vllm", "hf")
CONTROLLERS = ("ray", "local")
TRACKERS = ("console", "jsonl", "tensorboard", "wandb")
RESUME_MODES = ("auto", "disable", "resume_path")
SAVE_FAILURES = ("stop", "warn")
TRUNCATIONS = ("error", "left", "right", "middle")
LR_SCHEDULES = ("constant", "linear", "cosine")
SCHEDULE_UNITS = ("trainer_step", "optimizer_step")
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
DEVICES = ("auto", "cpu", "cuda")
OPTIMIZERS = ("AdamW", "Muon")
CHECKPOINTING_MODES = ("full", "selective")
PARALLEL_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that the training engine can cut over tp, sp and pp; data parallelism takes any."""
ROLLOUT_MODES = ("sync", "async")
LOAD_FORMATS = ("dummy", "auto", "safetensors", "hf", "dummy_dtensor", "dummy_hf", "dtensor")
"""All mean the same: the generator's weights come from the actor."""
VERIFY_MODES = ("first", "always")
IN_FLIGHT = ("recompute", "keep", "abort")
GRADIENT_SYNC_ORDERS = ("pipeline_first",)
PIPELINE_SCHEDULES = ("1f1b", "torch_1f1b", "torch_gpipe")
"""Ours, which takes micro-batches of any length, and torch's."""
SAVED_CONTENTS = ("model", "optimizer", "extra", "hf_model")
LOADED_CONTENTS = ("model", "optimizer", "extra")
IS_LEVELS = ("token", "sequence")
REJECTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
    "token",
    "sequence",
    "geometric",
)
BYPASS_LOSSES = ("ppo_clip", "reinforce")
GUARD_ACTIONS = ("warn", "fallback", "stop")
EXHAUSTED_ACTIONS = ("train", "skip", "error")
PROFILED_ROLES = ("actor", "reference", "rollout", "weights", "critic", "cost_critic", "reward_model", "reward")
"""Every role that a process may host."""
PROFILED_CONTENTS = ("cpu", "cuda", "memory", "shapes", "stack")
POOL_ROLES = ("rollout", "critic", "reference", "reward")
"""Roles that may have a pool of their own; the actor lives in the main one, and so does every role not named."""
