"""Names and shapes of a model's parameters from its config alone: built on the meta device, no weight is read."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from hybridflow.hybrid_engine.layouts import ModelShapes
from hybridflow.hybrid_engine.presets import PRESETS
from hybridflow.hybrid_engine.rules import Heads
from hybridflow.utils.errors import ConfigError


def load_config(model: str) -> PretrainedConfig:
    """The config of a preset's name, a model folder or a ``config.json``. Reads only local files.

    Raises:
        ConfigError: when it is none of these.
    """
    if model.lower() in PRESETS:
        entries = dict(PRESETS[model.lower()])
        return AutoConfig.for_model(entries.pop("model_type"), **entries)
    path = Path(model)
    if not path.exists():
        raise ConfigError(f"model {model!r} is neither a folder nor a config file nor one of {', '.join(PRESETS)}")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:  # no config.json, not json, a model type that it does not know
        said = str(error).partition("\n")[0]
        raise ConfigError(f"model {model!r} has no configuration that transformers reads: {said}") from error


def model_shapes(config: PretrainedConfig) -> ModelShapes:
    """Shapes of all parameters as the trainer names them (tied copies once) and what else a plan needs.

    Raises:
        ConfigError: transformers has no causal language model for it.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(f"model type {config.model_type!r} is no causal language model: {error}") from error
    text = config.get_text_config()
    query = text.num_attention_heads
    return ModelShapes(
        architecture=type(model).__name__,
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        heads=Heads(
            query=query,
            key_value=getattr(text, "num_key_value_heads", None) or query,
            size=getattr(text, "head_dim", None) or text.hidden_size // query,
        ),
        layers=text.num_hidden_layers,
    )
