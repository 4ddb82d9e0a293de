"""Liger's Triton kernels for norms, rotary positions and gated MLPs (``model.use_liger``). Not run here: needs CUDA.

Its losses are left out: log-probs and entropy are ours (models/logprobs.py). The rotary function is replaced in
transformers' module, so all models of that family in this process get it; norms and MLPs are those of ``net`` alone.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from hybridflow.utils import optional
from hybridflow.utils.errors import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose liger function takes the arguments below."""


def use_liger(net: PreTrainedModel) -> None:
    """Replaces ``net``'s kernels in place.

    Raises:
        ConfigError: when liger-kernel is not installed, or has no kernels for this family.
    """
    kind = net.config.model_type
    if kind not in FAMILIES:
        raise ConfigError(f"model.use_liger: no kernels are known for model type {kind!r} (only {', '.join(FAMILIES)})")
    try:
        replace = optional.load(f"liger_kernel.transformers:apply_liger_kernel_to_{kind}")
    except ConfigError as error:
        raise ConfigError(f"model.use_liger needs the package liger-kernel (hybridflow[liger]): {error}") from error
    replace(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=net)
