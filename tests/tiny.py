"""Tiny random models in Hugging Face folders, the workpieces of the test suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHARACTERS = "0123456789+-*/=()#., abcdefghijklmnopqrstuvwxyz\n?:"
VOCABULARY = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *CHARACTERS])}
_FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
"""Sizes of the mixture of experts."""
_MORE: dict[str, dict[str, Any]] = {"qwen3_moe": EXPERTS, "mistral": {"sliding_window": None}}


def save_tiny_model(
    folder: Path, *, family: str = "qwen2", tied: bool = True, seed: int = 0, extra_rows: int = 0, **overrides: int
) -> Path:
    """Writes a random model of about 0.4M parameters with a character tokenizer into ``folder``.

    ``extra_rows`` of the embedding belong to no token, as in models whose vocabulary is rounded up.
    """
    config_class, model_class = _FAMILIES[family]
    sizes = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    config = config_class(
        vocab_size=len(VOCABULARY) + extra_rows,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        **{**sizes, **_MORE.get(family, {}), **overrides},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return Path(folder)


def save_tokenizer(folder: Path) -> None:
    """Writes the character tokenizer that all tiny models share."""
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    ).save_pretrained(folder)
