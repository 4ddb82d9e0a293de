"""What the files of a model folder lack: a decoder that transformers knows, whole weights, a tokenizer.

Read as bytes, json and source; neither torch nor transformers is imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from hybridflow.config.problems import did_you_mean
from hybridflow.launch.hf_model import read_json, stored_tensors
from hybridflow.launch.plan import Finding
from hybridflow.utils.errors import MachineError

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""A tokenizer has one of these; tokenizer_config.json alone holds no vocabulary."""
_SETTINGS = "tokenizer_config.json"
_DECODERS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_model_files(key: str, folder: Path) -> Iterator[Finding]:
    """Findings on what loading the folder would stumble over; none: all is there."""
    yield from _known_type(key, folder)
    yield from _plain(key, folder)
    yield from _weights(key, folder)


def _plain(key: str, folder: Path) -> Iterator[Finding]:
    about = read_json(folder / "config.json").get("quantization_config")
    if about:
        kind = about.get("quant_method", "unknown") if isinstance(about, dict) else about
        text = f"{folder} holds quantised weights ({kind}), and training needs plain ones: QLoRA is not supported"
        fix = "Give the folder they were made from, with actor_rollout_ref.model.lora_rank for a small trained part."
        yield Finding(level="error", what=key, text=text, fix=fix)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all stored tensors by name; empty where there are none.

    Raises:
        MachineError: a file is none of safetensors, or was cut short.
    """
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: tuple(entry["shape"]) for name, entry in stored_tensors(file).items()}
    return found


def check_tokenizer(key: str, folder: Path) -> Iterator[Finding]:
    """A finding when the folder has no tokenizer, or one that is no json."""
    if not has_tokenizer(folder):
        fix = "Copy the tokenizer's files there, or set actor_rollout_ref.model.tokenizer_path."
        yield Finding(level="error", what=key, text=f"{folder} has no tokenizer (no {_TOKENIZERS[0]})", fix=fix)
    for name in (_TOKENIZERS[0], _SETTINGS):
        try:
            if (folder / name).is_file():
                read_json(folder / name)
        except MachineError as error:
            yield Finding(level="error", what=key, text=str(error), fix="Download it again.")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has the vocabulary of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer can render a chat; also said of one whose settings cannot be read."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return (folder / _SETTINGS).is_file() and bool(read_json(folder / _SETTINGS).get("chat_template"))
    except MachineError:  # a finding of check_tokenizer
        return True


@cache
def decoder_types() -> frozenset[str]:
    """Model types of which the installed transformers has a decoder, read from its source; empty: it does not say."""
    spec = importlib.util.find_spec("transformers")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [Path(place) / "models" / "auto" / "modeling_auto.py" for place in places]
    for file in files:
        if file.is_file():
            return frozenset(_first_names(ast.parse(file.read_bytes())))
    return frozenset()


def _first_names(tree: ast.Module) -> Iterator[str]:
    """First entries of the pairs in the table of decoders."""
    assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    for node in assigned:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        of_decoders = any(isinstance(target, ast.Name) and target.id == _DECODERS for target in targets)
        for pair in ast.walk(node) if of_decoders else ():
            if isinstance(pair, ast.Tuple) and isinstance(pair.elts[0], ast.Constant):
                yield str(pair.elts[0].value)


def _known_type(key: str, folder: Path) -> Iterator[Finding]:
    config = read_json(folder / "config.json")
    kind, known = config.get("model_type"), decoder_types()
    if "auto_map" in config or not known or kind in known:  # auto_map: the folder brings its code
        return
    if kind is None:
        text, fix = f"{folder}/config.json names no model_type", "Take the config.json that came with the model."
    else:
        text = f"transformers {metadata.version('transformers')} has no decoder of the model type {kind}"
        fix = did_you_mean(str(kind), sorted(known)) or "Use a causal language model, or a transformers that knows it."
    yield Finding(level="error", what=key, text=text, fix=fix)


def _weights(key: str, folder: Path) -> Iterator[Finding]:
    if (folder / INDEX).is_file():
        try:
            names = sorted({str(name) for name in read_json(folder / INDEX)["weight_map"].values()})
        except (MachineError, KeyError, AttributeError) as error:
            text = f"{folder / INDEX} is no index of weights: {error}"
            yield Finding(level="error", what=key, text=text, fix="Download it again.")
            return
    else:
        names = [WEIGHTS]
    absent = [name for name in names if not (folder / name).is_file()]
    if absent == [WEIGHTS]:
        text = f"{folder} has no {WEIGHTS} (nor an index of several): convert the model first"
        fix = "Load it once with transformers and call save_pretrained."
        yield Finding(level="error", what=key, text=text, fix=fix)
    elif absent:
        text = f"{folder} lacks {len(absent)} of {len(names)} files of weights that its index names, {absent[0]} first"
        yield Finding(level="error", what=key, text=text, fix="Download the rest.")
    for name in names:
        try:
            if name not in absent:
                stored_tensors(folder / name)
        except MachineError as error:
            yield Finding(level="error", what=key, text=str(error), fix="Download it again.")
            return
