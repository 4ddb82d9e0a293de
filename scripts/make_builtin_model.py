"""Makes the warm-start model that ships with hybridflow (``hybridflow/data/builtin_model``), in about three minutes.

A random 0.45M-parameter Qwen2 is supervised on additions: first on right answers until it has the idea, then by a
sloppy teacher, most of whose answers are wrong: he forgets the carry, or gets a digit wrong. What comes out is wrong on
most questions when sampled, and on most questions with a carry when greedy; GRPO has both to teach. The model never
sees a held-out pair. Usage:

    python scripts/make_builtin_model.py [--out FOLDER] [--clean-steps 700] [--sloppy-steps 150] [--wrong-share 0.7]
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM

from hybridflow.data.builtin import SHIPPED_MODEL
from hybridflow.data.builtin_spec import (
    EOS_ID,
    EOS_TOKEN,
    MODEL_CONFIG,
    PAD_ID,
    PAD_TOKEN,
    VOCABULARY,
    Pair,
    answer_text,
    pairs,
    prompt_text,
)

logger = logging.getLogger("make_builtin_model")
BATCH_ROWS = 256
FORGETFUL_SHARE = 0.8
"""Of the wrong answers to questions with a carry: those that forget it."""
IGNORED = -100
"""Label of positions without loss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED_MODEL, help="folder to write")
    parser.add_argument("--clean-steps", type=int, default=700, help="steps on right answers")
    parser.add_argument("--sloppy-steps", type=int, default=150, help="steps with the sloppy teacher")
    parser.add_argument("--wrong-share", type=float, default=0.7, help="share of his answers that are wrong")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(options.seed)
    model = Qwen2ForCausalLM(AutoConfig.for_model(**MODEL_CONFIG))
    draw = random.Random(options.seed)
    supervise(model, draw, steps=options.clean_steps, peak_lr=3e-3, wrong_share=0.0)
    supervise(model, draw, steps=options.sloppy_steps, peak_lr=1e-3, wrong_share=options.wrong_share)
    write_folder(model, options.out)


def supervise(model: Qwen2ForCausalLM, draw: random.Random, *, steps: int, peak_lr: float, wrong_share: float) -> None:
    """Trains ``model`` in place on training pairs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak_lr, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        ids, labels = demonstrations(draw.choices(pairs("train"), k=BATCH_ROWS), draw, wrong_share)
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            greedy, sampled = (accuracy(model, greedy=greedy) for greedy in (True, False))
            logger.info("step %d loss %.3f held out: greedy %.3f sampled %.3f", step, loss.item(), greedy, sampled)


def demonstrations(batch: list[Pair], draw: random.Random, wrong_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels ``[rows, longest]`` of questions with answers, padded on the right."""
    texts = []
    for pair in batch:
        right = answer_text(pair)
        texts.append((prompt_text(pair), mistake(pair, draw) if draw.random() < wrong_share else right))
    width = max(len(question) + len(answer) + 1 for question, answer in texts)
    ids = torch.full((len(texts), width), PAD_ID)
    labels = torch.full((len(texts), width), IGNORED)
    for row, (question, answer) in enumerate(texts):
        line = torch.tensor([VOCABULARY[character] for character in question + answer] + [EOS_ID])
        ids[row, : len(line)] = line
        labels[row, len(question) : len(line)] = line[len(question) :]
    return ids, labels


def mistake(pair: Pair, draw: random.Random) -> str:
    """A wrong answer: without the carry of the units where there is one (mostly), else with one digit changed."""
    if sum(number % 10 for number in pair) >= 10 and draw.random() < FORGETFUL_SHARE:
        return str(sum(pair) - 10)
    right = answer_text(pair)
    at = draw.randrange(len(right))
    digit = draw.choice([digit for digit in "0123456789" if digit != right[at]])
    return right[:at] + digit + right[at + 1 :]


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, *, greedy: bool, rows: int = 512) -> float:
    """Share of held-out questions that are answered right."""
    questions = pairs("held_out")[:rows]
    prompts = [[VOCABULARY[character] for character in prompt_text(pair)] for pair in questions]
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts])
    out = model.generate(
        ids,
        attention_mask=(ids != PAD_ID).long(),
        do_sample=not greedy,
        top_k=None,
        max_new_tokens=4,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )
    symbols = list(VOCABULARY)
    said = ["".join(symbols[i] for i in row if i != PAD_ID) for row in out[:, width:].tolist()]
    right = sum(text == answer_text(pair) + EOS_TOKEN for text, pair in zip(said, questions, strict=True))
    return right / len(questions)


def write_folder(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Writes weights (half precision), configurations and tokenizer as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.half().contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    characters = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=PAD_TOKEN, eos_token=EOS_TOKEN, model_max_length=128
    ).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    size = sum(file.stat().st_size for file in folder.iterdir())
    logger.info("%s: %.2f MB", folder, size / 1e6)


if __name__ == "__main__":
    main()
