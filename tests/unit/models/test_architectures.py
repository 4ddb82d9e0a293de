"""Causal language models that no plan knows: they train as transformers runs them, or are refused with the reason.

The reference is transformers' own forward, one row at a time, over the folder that transformers wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hybridflow.batch.batch import Batch
from hybridflow.engines.train.base import MicroBatching
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError, EngineError, MachineError
from tests.invariants.training_steps import LOSSES, VOCABULARY, Case, assemble, blocks, build, make_rows, own_rows
from tests.ranks import run_ranks

SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=1,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=32)
TRAIN: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {},  # the folder says embed_out, the module lm_head
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "mixtral": {**EXPERTS, "num_local_experts": 4},  # experts one by one, under other names
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "'lfm2' has layers of kind conv: packed rows would see"),
    "llama4_text": ({}, "layers of kind chunked_attention"),
    "gemma2": ({"head_dim": 8}, "changes its logits .final_logit_softcapping.: it is not supported"),
    "recurrent_gemma": ({"head_dim": 8, "lru_width": 32}, "layers of kind|changes its logits|packed rows"),
    "bert": (
        {"is_decoder": True},
        "makes its logits in another way than hidden @ W.T . b",
    ),
    "bert-generation": ({}, "attends to later tokens too: it is no causal language model"),
}


def save(folder: Path, kind: str, **more: Any) -> PreTrainedModel:
    """A random model of ``kind`` in ``folder``, buffers included."""
    config_class = CONFIG_MAPPING[kind]
    base = config_class()
    config = config_class(**{name: value for name, value in SIZES.items() if hasattr(base, name)}, **more)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for name, held in model.state_dict().items():
                if held.ndim > 1 or "bias" in name:
                    held.normal_(0, 0.15)
    model.save_pretrained(folder)
    return model


def by_definition(model: Any, rows: Batch) -> Tensor:
    """Log-probs ``[b, T]``, one row at a time."""
    width, columns = rows["response_ids"].shape[1], []
    for i in range(len(rows)):
        p, r = int(rows["prompt_length"][i]), int(rows["response_length"][i])
        ids = torch.cat([rows["prompt_ids"][i, :p], rows["response_ids"][i, :r]])[None]
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0] / 0.7, -1)[p - 1 : p + r - 1]
        columns.append(torch.nn.functional.pad(log_p[torch.arange(r), ids[0, p:]], (0, width - r)))
    return torch.stack(columns)


def log_probs(folder: Path | str) -> Tensor:
    engine, everything = build(Case(str(folder))), MicroBatching(max_tokens=1000)
    return engine.forward(make_rows(6), frozenset({"log_probs"}), temperature=0.7, micro=everything)["log_probs"]


@pytest.mark.parametrize("kind", TRAIN)
def test_log_probs_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save(tmp_path, kind, **TRAIN[kind])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(log_probs(tmp_path), by_definition(model, make_rows(6)), atol=5e-6, rtol=0)


def test_a_buffer_that_belongs_to_the_weights_is_read_and_written(tmp_path: Path) -> None:
    """The balancing term of a router decides which experts a token meets."""
    save(tmp_path / "one", "glm4_moe", **TRAIN["glm4_moe"])
    engine = build(Case(str(tmp_path / "one")))
    engine.save_hf(str(tmp_path / "two"))
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        for name in ("two", "one")
    )
    name = next(name for name in theirs if name.endswith("e_score_correction_bias"))
    assert float(theirs[name].abs().max()) > 0.01
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def one_step(case: Case, exported: str) -> dict[str, Any]:
    engine = build(case)
    rows = own_rows(make_rows(8), case.dims, dist.get_rank() if dist.is_initialized() else 0)
    counts = engine.counts(rows)
    metrics = engine.update(rows, LOSSES["lm"], temperature=0.7, micro=case.micro, counts=counts)
    engine.save_hf(exported)
    return {"loss": metrics["loss"], "after": blocks(engine)}


def test_weights_under_other_names_train_on_two_ranks_as_on_one_and_are_exported(tmp_path: Path) -> None:
    save(tmp_path / "model", "mixtral", **TRAIN["mixtral"])
    case = Case(str(tmp_path / "model"))
    one = one_step(case, str(tmp_path / "one"))
    two = run_ranks(2, one_step, Case(case.folder, dims=ParallelDims(dp_shard=2)), str(tmp_path / "two"))
    assert two[0]["loss"] == pytest.approx(one["loss"], abs=1e-6)
    want, got = assemble([one["after"]]), assemble([rank["after"] for rank in two])
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-6, rtol=0)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float32)
    torch.testing.assert_close(log_probs(tmp_path / "two"), by_definition(read, make_rows(6)), atol=5e-6, rtol=0)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_packing_or_our_head_would_get_wrong_is_refused_at_start(kind: str, tmp_path: Path) -> None:
    more, match = REFUSED[kind]
    save(tmp_path, kind, **more)
    with pytest.raises((ConfigError, EngineError), match=match):
        build(Case(str(tmp_path)))


def test_a_weight_that_no_name_leads_to_is_missing_still(tmp_path: Path) -> None:
    model = save(tmp_path, "mixtral", **TRAIN["mixtral"])
    state = {name: held for name, held in model.state_dict().items() if "layers.1.self_attn.q_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(MachineError, match=r"no weights for model\.layers\.1\.self_attn\.q_proj\.weight"):
        build(Case(str(tmp_path)))
