"""Sizes of a Hugging Face model, read from its folder without transformers and without torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.data import BUILTIN_TASK
from hybridflow.data.builtin_spec import MODEL_CONFIG
from hybridflow.utils.errors import MachineError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the plan needs to know about a decoder."""

    kind: str
    """``model_type`` of its configuration."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether embedding and output projection are one parameter."""
    context: int | None
    """Positions that the model was built for; None: not said."""
    parameters: int
    """Counted in the weight files, or else from the sizes."""


def find_folder(path: str) -> Path | None:
    """The local folder of a model: ``path`` itself or the hub's cache; None: not on this machine."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{path.replace('/', '--')}"
    main = cache / "refs" / "main"
    snapshots = [cache / "snapshots" / main.read_text().strip()] if main.is_file() else []
    snapshots += sorted((cache / "snapshots").glob("*")) if (cache / "snapshots").is_dir() else []
    return next((folder for folder in snapshots if (folder / "config.json").is_file()), None)


def looks_like_hub_name(path: str) -> bool:
    """Whether ``path`` could be ``owner/name`` on the hub and is no file path."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path.partition("/")[0]).is_dir()


def read_model(path: str, override: Mapping[str, Any] | None = None) -> ModelFacts | None:
    """Facts of the model at ``path``; None when no folder of it is on this machine.

    Raises:
        MachineError: the folder has no config.json, or one without the sizes of a decoder.
    """
    if path == BUILTIN_TASK:
        return facts({**MODEL_CONFIG, **(override or {})})
    folder = find_folder(path)
    if folder is None:
        return None
    file = folder / "config.json"
    if not file.is_file():
        raise MachineError(f"{folder} has no config.json: it is no Hugging Face model folder")
    try:
        config = json.loads(file.read_text())
        return facts({**config, **(override or {})}, counted=_counted(folder))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise MachineError(f"{file} does not describe a decoder: {type(error).__name__} {error}") from error


def facts(config: Mapping[str, Any], counted: int | None = None) -> ModelFacts:
    """Facts from the fields of a Hugging Face configuration; ``counted``: parameters, where the files tell."""
    config = config.get("text_config") or config
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    layers, vocabulary = int(config["num_hidden_layers"]), int(config["vocab_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    intermediate = int(config.get("intermediate_size") or 4 * hidden)
    tied = bool(config.get("tie_word_embeddings", True))
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    width = int(config.get("moe_intermediate_size") or intermediate)
    feed_forward = experts * 3 * hidden * width + experts * hidden if experts else 3 * hidden * intermediate
    bias = (
        head_dim * (heads + 2 * kv_heads) if config.get("model_type") == "qwen2" or config.get("attention_bias") else 0
    )
    norms = 2 * hidden + (2 * head_dim if str(config.get("model_type")).startswith("qwen3") else 0)
    total = layers * (attention + feed_forward + bias + norms) + hidden + vocabulary * hidden * (1 if tied else 2)
    return ModelFacts(
        kind=str(config.get("model_type", "unknown")),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied=tied,
        context=config.get("max_position_embeddings"),
        parameters=counted or total,
    )


def _counted(folder: Path) -> int | None:
    """Elements of all tensors in the safetensors headers; None when there are no such files."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(_elements(file) for file in files) or None


def _elements(file: Path) -> int:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
