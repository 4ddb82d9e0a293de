"""Sizes of a Hugging Face model, read from its folder without transformers and without torch."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hybridflow.config.data import BUILTIN_TASK
from hybridflow.data.builtin_spec import MODEL_CONFIG
from hybridflow.utils.errors import MachineError

HUB_TIMEOUT_S = 3.0
"""Seconds in which the hub takes a connection, where it can be reached at all."""


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


@cache
def hub_answers() -> bool:
    """Whether the hub takes a connection within moments; also said where a proxy stands between, which is not asked."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    found: list[bool] = []

    def ask() -> None:
        try:
            socket.create_connection((url.hostname or "", url.port or 443), timeout=HUB_TIMEOUT_S).close()
        except OSError:
            return
        found.append(True)

    asking = threading.Thread(target=ask, daemon=True)  # a resolver of names knows no deadline
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return bool(found)


def read_model(path: str, override: Mapping[str, Any] | None = None) -> ModelFacts | None:
    """Facts of the model at ``path``; None when no folder of it is on this machine.

    Raises:
        MachineError: the folder has no config.json that can be read, or one without the sizes of a decoder.
    """
    if path == BUILTIN_TASK:
        return facts({**MODEL_CONFIG, **(override or {})})
    folder = find_folder(path)
    if folder is None:
        return None
    file = folder / "config.json"
    if not file.is_file():
        raise MachineError(f"{folder} has no config.json: it is no Hugging Face model folder")
    config = read_json(file)
    try:
        return facts({**config, **(override or {})}, counted=_counted(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise MachineError(f"{file} does not describe a decoder: {type(error).__name__} {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a json file of a model folder.

    Raises:
        MachineError: it cannot be read, or holds something else; names the file.
    """
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise MachineError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise MachineError(f"{file} is not valid json: {error}") from error
    if not isinstance(found, dict):
        raise MachineError(f"{file} holds no object")
    return found


def stored_tensors(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: dtype, shape and place of every tensor by name.

    Raises:
        MachineError: it is none, or has another length than its header says: a download that was cut short.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        begin = stream.read(8)
        length = int.from_bytes(begin, "little")
        if begin.startswith(b"version "):
            raise MachineError(f"{file} is a Git LFS pointer in place of weights: run git lfs pull there")
        if size < 10 or length > size - 8:
            raise MachineError(f"{file} ({size:,} bytes) is no whole safetensors file: its header is cut short")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MachineError(f"{file} is no safetensors file: its header cannot be read") from error
    if size != end:
        raise MachineError(f"{file} has {size:,} bytes, and its header says {end:,}: it was cut short")
    return tensors


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
    """Elements of all tensors in the safetensors headers; None when there are no such files, or they are damaged."""
    try:
        stored = [stored_tensors(file) for file in sorted(folder.glob("*.safetensors"))]
    except MachineError:  # reported by launch/model_files.py
        return None
    return sum(math.prod(entry["shape"]) for tensors in stored for entry in tensors.values()) or None
