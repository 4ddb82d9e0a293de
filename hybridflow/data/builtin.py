"""The embedded default task on disk: the shipped warm-start model (a Hugging Face folder) and generated prompts.

The model's folder is package data (made by ``scripts/make_builtin_model.py``), so every node that has hybridflow has
it. Weights are stored in half precision; ``config.json`` says float32, which is what they are loaded as.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from hybridflow.config.data import BUILTIN_TASK
from hybridflow.data.builtin_spec import DATA_SOURCE, answer_text, pairs, prompt_text
from hybridflow.utils.errors import DataError, MachineError

SHIPPED_MODEL = Path(__file__).parent / "builtin_model"
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def ensure_builtin_model(folder: Path | None = None) -> Path:
    """Folder of the embedded model, ready for transformers and vLLM: the shipped one, or a copy of it in ``folder``.

    Raises:
        MachineError: when the installation lacks the model's files.
    """
    missing = [name for name in _FILES if not (SHIPPED_MODEL / name).is_file()]
    if missing:
        raise MachineError(
            f"{SHIPPED_MODEL} lacks {', '.join(missing)}: install hybridflow again or run scripts/make_builtin_model.py"
        )
    if folder is None:
        return SHIPPED_MODEL
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copyfile(SHIPPED_MODEL / name, folder / name)
    return folder


def model_folder(path: str) -> str:
    """``path`` as transformers understands it: the embedded model's folder for ``builtin:arithmetic``, else itself."""
    return str(ensure_builtin_model()) if path == BUILTIN_TASK else path


def arithmetic_rows(size: int, *, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """``size`` different questions in the columns of a data file.

    Training questions are drawn by ``seed``; held-out ones are always the same, so that runs compare.

    Raises:
        DataError: when there are not so many different questions.
    """
    available = pairs("held_out" if held_out else "train")
    if not 0 < size <= len(available):
        key = "data.generated_val_size" if held_out else "data.generated_size"
        raise DataError(f"{key}={size}: {BUILTIN_TASK} has 1 to {len(available)} different questions there")
    drawn = available[:size] if held_out else random.Random(seed).sample(available, size)
    return [
        {
            "prompt": prompt_text(pair),
            "data_source": DATA_SOURCE,
            "reward_model": {"style": "rule", "ground_truth": answer_text(pair)},
            "extra_info": {},
        }
        for pair in drawn
    ]
