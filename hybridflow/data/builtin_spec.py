"""What the embedded task is, in integers and strings: two numbers below 100 are added, one character per token.

    "37+85=" -> "122<eos>"

All 10,000 operand pairs are dealt once, by a fixed draw, into 9,000 for training and 1,000 held out. Neither the warm
start nor any run sees a held-out pair in training, so validation measures generalisation. Torch-free.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any, Literal

DATA_SOURCE = "hybridflow/arithmetic"
"""Scorer name of its rows."""

OPERAND_LIMIT = 100
HELD_OUT_PAIRS = 1000
_DEAL_SEED = 20260101
"""Of the deal into training and held-out pairs; the shipped weights were trained on this deal, so it is fixed."""

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*="
VOCABULARY: dict[str, int] = {token: i for i, token in enumerate((PAD_TOKEN, EOS_TOKEN, *CHARACTERS))}
PAD_ID, EOS_ID = VOCABULARY[PAD_TOKEN], VOCABULARY[EOS_TOKEN]

MODEL_CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "pad_token_id": PAD_ID,
    "eos_token_id": EOS_ID,
    "bos_token_id": None,
}
"""Fields of the model's Hugging Face configuration (0.45M parameters)."""

Pair = tuple[int, int]
Split = Literal["train", "held_out"]


@cache
def pairs(split: Split) -> tuple[Pair, ...]:
    """All operand pairs of one side of the fixed deal, shuffled."""
    every = [(a, b) for a in range(OPERAND_LIMIT) for b in range(OPERAND_LIMIT)]
    random.Random(_DEAL_SEED).shuffle(every)
    return tuple(every[:HELD_OUT_PAIRS] if split == "held_out" else every[HELD_OUT_PAIRS:])


def prompt_text(pair: Pair) -> str:
    """The question as the model reads it."""
    return f"{pair[0]}+{pair[1]}="


def answer_text(pair: Pair) -> str:
    """The right answer."""
    return str(pair[0] + pair[1])
