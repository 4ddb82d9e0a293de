"""Where a run keeps its checkpoints, and what changed between one's configuration and that of the run that goes on."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

import hybridflow
from hybridflow.config.root import PPOConfig
from hybridflow.trainer.checkpoint import CheckpointStore, Retention
from hybridflow.trainer.remote import RemoteFolder

logger = logging.getLogger(__name__)

Weight = Literal["changes the run", "other rounding only", "no effect on results"]

_OF_TRAINER = (
    *("project_name", "experiment_name", "default_local_dir", "logger", "total_epochs", "total_training_steps"),
    *("save_freq", "test_freq", "val_*", "resume_*", "max_*", "restart_*", "keep_every", "best_metric"),
    *("checkpoint_copy", "save_failure", "log_val_generations", "*_data_dir", "timeouts.*"),
    *("dry_run", "strict"),
    "threads_per_worker",
)
NO_EFFECT = (
    *(f"trainer.{name}" for name in _OF_TRAINER),
    "ray_kwargs.*",
    "profiler.*",
    "*.checkpoint.*",
    "*.nccl_timeout",
    "*.val_kwargs.*",
    "data.val_*",
    "data.generated_val_size",
)
"""Keys that do not reach a training step; validation leaves no state."""
ROUNDING = (
    *(f"trainer.{name}" for name in ("nnodes", "n_gpus_per_node", "device", "controller", "pools*", "balance_batch")),
    "*micro_batch_size*",
    "*max_token_len_per_gpu",
    "*use_dynamic_bsz",
    "*_offload",
    "*.offload_policy",
    "*.fsdp_size",
    "*.reshard_after_forward",
    "*.forward_prefetch",
    "*_parallel_size",
    "*.pipeline_schedule",
    "*.enable_gradient_checkpointing",
    "*.gradient_checkpointing_mode",
    "*.use_prefix_grouper",
    "*.use_liger",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_*",
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.free_cache_engine",
    "actor_rollout_ref.rollout.checkpoint_engine.*",
)
"""Keys that compute the same quantities in another order."""
LENGTH = ("trainer.total_training_steps", "trainer.total_epochs")
"""Matter where a learning-rate schedule ends with the run."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs."""

    key: str
    before: Any
    now: Any
    weight: Weight


def plain_config(config: PPOConfig) -> dict[str, Any]:
    """The configuration as JSON holds it."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def changes(before: Mapping[str, Any], config: PPOConfig) -> list[Change]:
    """Every key that differs from the saved tree, the weightiest first; where one side lacks it, that is None."""
    old, new = dict(_leaves(before)), dict(_leaves(plain_config(config)))
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    found = [Change(key, old.get(key), new.get(key), _weight(key, config)) for key in keys]
    order: tuple[Weight, ...] = ("changes the run", "other rounding only", "no effect on results")
    return sorted(found, key=lambda change: (order.index(change.weight), change.key))


def tell_changes(before: Mapping[str, Any], config: PPOConfig) -> None:
    """Logs which keys differ and what each means: a warning when one changes the run."""
    found = changes(before, config)
    if not found:
        return
    width = max(len(change.key) for change in found)
    lines = [f"  {change.key:<{width}}  {change.before!r} -> {change.now!r}  ({change.weight})" for change in found]
    heavy = sum(change.weight == "changes the run" for change in found)
    level = logging.WARNING if heavy else logging.INFO
    told = f"{heavy} of them so that the run is another one from here on" if heavy else "none of them changes the run"
    logger.log(level, "%d keys differ from those of the checkpoint, %s:\n%s", len(found), told, "\n".join(lines))


def checkpoint_store(config: PPOConfig) -> CheckpointStore:
    """Where the checkpoints of a run go and which of them stay; versions and layout are in every manifest."""
    settings = config.trainer
    return CheckpointStore(
        Path(settings.default_local_dir),
        Retention(
            newest=settings.max_actor_ckpt_to_keep,
            every=settings.keep_every,
            best=settings.best_metric is not None,
        ),
        {
            "versions": versions(),
            "layout": {"nnodes": settings.nnodes, "n_gpus_per_node": settings.n_gpus_per_node},
        },
        None
        if settings.checkpoint_copy is None
        else RemoteFolder(settings.checkpoint_copy, deadline_s=settings.timeouts.save_s),
        fetch_s=settings.timeouts.save_s,
    )


def versions() -> dict[str, str]:
    """Of what decides the bits of a run."""
    return {
        "hybridflow": hybridflow.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def tell_versions(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Warns where the checkpoint was written by other versions: results are then the same up to rounding only."""
    other = [f"{name} {before.get(name)} -> {version}" for name, version in now.items() if before.get(name) != version]
    if other:
        logger.warning("the checkpoint was written by other versions (%s)", ", ".join(other))


def _weight(key: str, config: PPOConfig) -> Weight:
    if key in LENGTH and _schedule_ends_with_run(config):
        return "changes the run"
    if any(fnmatchcase(key, pattern) for pattern in NO_EFFECT):
        return "no effect on results"
    if any(fnmatchcase(key, pattern) for pattern in ROUNDING):
        return "other rounding only"
    return "changes the run"


def _schedule_ends_with_run(config: PPOConfig) -> bool:
    optims = [config.actor_rollout_ref.actor.optim, *([config.critic.optim] if config.needs_critic else [])]
    return any(optim.lr_scheduler_type != "constant" or optim.lr_warmup_steps_ratio > 0 for optim in optims)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
