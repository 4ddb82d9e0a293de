"""What a user is told when a single row does not fit: the phase, and three settings that make room in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybridflow.config.root import PPOConfig
from hybridflow.utils.errors import DeviceMemoryError

ADVISED = 3
"""Settings that are named."""


@contextmanager
def explained(phase: str, config: PPOConfig, *, critic: bool = False) -> Iterator[None]:
    """Adds to a ``DeviceMemoryError`` from inside what the engine cannot know: the phase and the names of settings."""
    try:
        yield
    except DeviceMemoryError as error:
        settings = "; ".join(
            f"({number}) {setting}" for number, setting in enumerate(room_makers(phase, config, critic), 1)
        )
        raise DeviceMemoryError(f"{phase}: {error}. What makes room: {settings}") from error


def room_makers(phase: str, config: PPOConfig, critic: bool) -> Sequence[str]:
    """The three settings to change that promise most and are not in use yet."""
    policy = config.actor_rollout_ref
    at, model_at = ("critic", "critic.model") if critic else ("actor_rollout_ref.actor", "actor_rollout_ref.model")
    section, model = (config.critic, config.critic.model) if critic else (policy.actor, policy.model)
    sharding_at = f"{at}.model.fsdp_config" if critic else f"{at}.fsdp_config"
    if phase == "compute_model_score":
        at, section = "reward.reward_model", config.reward.reward_model
    found = []
    if phase.startswith("update") and not model.enable_gradient_checkpointing:
        found.append(f"{model_at}.enable_gradient_checkpointing=True recomputes activations instead of keeping them")
    elif phase.startswith("update") and model.gradient_checkpointing_mode == "selective":
        found.append(f"{model_at}.gradient_checkpointing_mode=full keeps nothing of a layer but its input")
    if section.ulysses_sequence_parallel_size == 1:
        found.append(f"{at}.ulysses_sequence_parallel_size=2 spreads the tokens of a row over two devices")
    if not section.sharding.optimizer_offload:
        found.append(f"{sharding_at}.optimizer_offload=True keeps the optimizer in host memory between updates (GPU)")
    limit = config.response_length
    found.append(f"data.max_response_length (now {limit}) bounds the tokens of a row")
    share = policy.rollout.gpu_memory_utilization
    found.append(f"actor_rollout_ref.rollout.gpu_memory_utilization (now {share:g}) is what the generator takes (GPU)")
    found.append("trainer.n_gpus_per_node: weights, gradients and moments are cut over all of them")
    return found[:ADVISED]
