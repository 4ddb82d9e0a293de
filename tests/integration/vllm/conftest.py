"""The vLLM engines of this folder: built in the test process, kept until it ends.

vLLM reads its environment while it is imported, so the variables are set here, before any test module is. Engines are
never dropped during the session: vLLM's clean-up ends torch.distributed for the whole process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hybridflow.engines.rollout.environment import unset, variables

for _name, _value in variables("vllm", "cpu").items():
    if "vllm" in sys.modules and os.environ.get(_name) is None:
        raise RuntimeError(
            f"vllm was imported before {_name}={_value} could be set; run this folder in its own process"
        )
    os.environ.setdefault(_name, _value)
for _name in unset("vllm", "cpu"):
    os.environ.pop(_name, None)

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from hybridflow.config.actor import RolloutConfig  # noqa: E402
from hybridflow.engines.rollout.base import RolloutEngine  # noqa: E402
from tests.tiny import save_tiny_model  # noqa: E402

SIZES = {"hidden_size": 128, "head_dim": 32}
"""vLLM's CPU attention takes heads of 32, not of 16."""


def write(engine: RolloutEngine, model: PreTrainedModel, version: int) -> None:
    """Publishes a whole model by hand: every slice copied to where the engine says it lies."""
    copy(engine, model)
    engine.weights_written(version)


def copy(engine: RolloutEngine, model: PreTrainedModel) -> None:
    """The first half of a publish: weights without a word to the engine."""
    weights = dict(model.named_parameters())
    for part in engine.parameters().parts:
        part.view.copy_(weights[part.hf_name].data[tuple(slice(start, stop) for start, stop in part.hf_box)])


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def changed(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with every weight moved."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return other


@torch.no_grad()
def forward_log_probs(
    model: PreTrainedModel, prompt: list[int], tokens: tuple[int, ...], temperature: float = 1.0
) -> list[float]:
    """Log-probs of ``tokens`` after ``prompt``, by one plain forward."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def distance(one: tuple[float, ...] | list[float], other: tuple[float, ...] | list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="session")
def make_engine() -> Iterator[Callable[..., RolloutEngine]]:
    from hybridflow.engines.rollout.vllm import VLLMEngine

    kept = []

    def make(folder: Path, *, rollout: dict | None = None, **arguments) -> RolloutEngine:
        config = RolloutConfig(**{"max_num_seqs": 16, "max_num_batched_tokens": 512, **(rollout or {})})
        given = {"max_prompt_tokens": 128, "max_response_tokens": 64, "tp": 1, "device": "cpu", "eos_token_ids": ()}
        kept.append(VLLMEngine(model_path=str(folder), config=config, **{**given, **arguments}))
        return kept[-1]

    yield make
    if kept:
        kept[0].close()  # ends torch.distributed for all; what is left goes with the process


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), **SIZES)


@pytest.fixture(scope="session")
def model(folder: Path) -> PreTrainedModel:
    return load_model(folder)


@pytest.fixture(scope="session")
def session_engine(make_engine: Callable[..., RolloutEngine], folder: Path) -> RolloutEngine:
    return make_engine(folder)


@pytest.fixture
def engine(session_engine: RolloutEngine, model: PreTrainedModel) -> RolloutEngine:
    """The engine of the session, awake, idle, with version 0 of the weights."""
    session_engine.wake()
    for request_id in [str(index) for index in range(64)]:
        session_engine.cancel([request_id])
    write(session_engine, model, 0)
    return session_engine
