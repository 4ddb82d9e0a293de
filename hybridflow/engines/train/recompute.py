"""Activation checkpointing: what a layer keeps from its forward to its backward pass.

    full         its input; the whole layer runs again
    selective    its input, and what matrix products and attention gave: norms, rotary positions, activations and
                 communication run again, which cost memory traffic but hardly any arithmetic

Both go through transformers' checkpointed layers; selective is torch's own policy per operation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from hybridflow.config.model import ModelConfig
from hybridflow.utils.errors import ConfigError

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    }
)
"""Operations whose results are kept. Not batched products: where attention is made of them, they are quadratic."""


def checkpoint_layers(body: nn.Module, config: ModelConfig) -> None:
    """Has the layers of ``body`` recomputed in the backward pass as ``config`` says, in place.

    Raises:
        ConfigError: when transformers cannot checkpoint this architecture.
    """
    assert isinstance(body, PreTrainedModel)
    if not body.supports_gradient_checkpointing:
        raise ConfigError(
            f"model.enable_gradient_checkpointing: transformers cannot checkpoint {type(body).__name__}: use False"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if config.gradient_checkpointing_mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    body.gradient_checkpointing_enable(options)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation._schema.name in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
