"""Tensor-parallel engines: two ranks of a gloo world, each with its own engine, in lockstep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridflow.config.actor import RolloutConfig
from hybridflow.engines.rollout.base import Request, SamplingParams, generate
from hybridflow.utils.errors import EngineError
from hybridflow.utils.seeding import derive_seed
from tests.integration.vllm.conftest import SIZES, changed, distance, forward_log_probs, load_model, write
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-5
PROMPTS = [[5, 9, 14], [7, 8, 9, 10, 11, 12, 13, 14, 15, 4, 5], [30], [21, 22, 23, 24, 25]]


def requests() -> list[Request]:
    sampling = SamplingParams(max_tokens=12)
    return [
        Request(request_id=str(i), prompt_ids=PROMPTS[i], sampling=sampling, seed=derive_seed(0, i)) for i in range(4)
    ]


def build(folder: str, lockstep_timeout_s: float = 60.0):
    from hybridflow.engines.rollout.vllm import VLLMEngine

    return VLLMEngine(
        model_path=folder,
        config=RolloutConfig(max_num_seqs=8, max_num_batched_tokens=512),
        max_prompt_tokens=64,
        max_response_tokens=64,
        tp=2,
        device="cpu",
        eos_token_ids=(),
        lockstep_timeout_s=lockstep_timeout_s,
    )


def tensor_parallel_rank(folder: str) -> dict:
    """On each of two ranks: what it stores, generates, and says when the ranks are told different things."""
    rank, model, engine = dist.get_rank(), load_model(Path(folder)), build(folder)
    found: dict = {"boxes": {part.hf_name: (part.hf_box, part.hf_shape) for part in engine.parameters().parts}}
    write(engine, model, 0)
    found["done"] = generate(engine, requests())
    write(engine, changed(model), 1)
    found["next"] = generate(engine, requests())
    found["world lives"] = dist.is_initialized()
    mapped = Path("/proc/self/maps").read_text().splitlines()
    found["segments"] = [line for line in mapped if "/dev/shm/" in line and not line.endswith("(deleted)")]
    others = [build(folder) for _ in range(2)]
    engine.submit(requests()[:: -1 if rank else 1])
    found["other order"] = _failure(engine)
    found["missed"] = _missed_request(others[0])
    found["failed"] = _failed_rank(others[1])
    dist.barrier()  # as in a worker, which lives on after its call failed: a process that is gone gives no last word
    return found


def _missed_request(engine) -> str:
    """Rank 1 is given one request less."""
    engine.weights_written(0)
    engine.submit(requests()[: 4 - dist.get_rank()])
    return _failure(engine)


def _failed_rank(engine) -> str:
    """Rank 1 fails after the forward pass of its second step."""
    engine.weights_written(0)
    engine.submit(requests())
    engine.step()
    if dist.get_rank() == 1:
        engine._running = {f"lost {name}": response for name, response in engine._running.items()}
        return _failure(engine)
    return _failure(engine) or _failure(engine)


def _failure(engine) -> str:
    try:
        engine.step()
    except EngineError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), **SIZES, num_key_value_heads=1)


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict]:
    return run_ranks(2, tensor_parallel_rank, str(folder), deadline_s=150)


def test_every_rank_names_the_slices_that_it_stores(folder: Path, found: list[dict]) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in load_model(folder).named_parameters()}
    for one in found:
        assert {name: shape for name, (_, shape) in one["boxes"].items()} == shapes
    first, second = (one["boxes"] for one in found)
    layer = "model.layers.1."
    assert first[layer + "self_attn.q_proj.weight"][0] == ((0, 64), (0, 128))
    assert second[layer + "self_attn.q_proj.weight"][0] == ((64, 128), (0, 128))
    assert second[layer + "self_attn.k_proj.bias"][0] == ((0, 32),)  # one key head, held twice
    assert second[layer + "mlp.up_proj.weight"][0] == ((64, 128), (0, 128))
    assert second[layer + "mlp.down_proj.weight"][0] == ((0, 128), (64, 128))
    assert first["model.embed_tokens.weight"][0] == ((0, 32), (0, 128))
    assert second["model.embed_tokens.weight"][0] == ((32, 54), (0, 128))


def test_two_ranks_sample_as_one_with_the_weights_that_were_written(folder: Path, found: list[dict]) -> None:
    model = load_model(folder)
    for key, current in (("done", model), ("next", changed(model))):
        assert found[0][key] == found[1][key]
        for done in found[0][key]:
            expected = forward_log_probs(current, PROMPTS[int(done.request_id)], done.token_ids)
            assert distance(done.log_probs, expected) <= TOLERANCE


def test_a_tensor_parallel_engine_leaves_the_world_and_no_shared_memory_names(found: list[dict]) -> None:
    for one in found:
        assert one["world lives"]
        assert one["segments"] == []


def test_another_order_of_requests_on_one_rank_is_an_error(found: list[dict]) -> None:
    for one in found:
        assert "disagree: [0] | [1]" in one["other order"]


def test_a_rank_that_missed_a_request_is_an_error_and_not_a_hang(found: list[dict]) -> None:
    for one in found:
        assert "disagree: [0] | [1]" in one["missed"]


def test_a_rank_that_fails_tells_its_peer(found: list[dict]) -> None:
    assert "a tensor-parallel peer failed in its step: rank 1: KeyError" in found[0]["failed"]
    assert "vLLM failed in a step" in found[1]["failed"]


def test_lockstep_names_the_ranks_that_were_told_something_else() -> None:
    assert run_ranks(4, lockstep_rank) == ["", "", *2 * ["tensor-parallel ranks disagree: [2] | [3"]]


def lockstep_rank() -> str:
    """Two groups of two; in the second one, ranks were given the same things in another order."""
    from hybridflow.engines.rollout.lockstep import Lockstep

    torch.set_num_threads(1)
    guard, rank = Lockstep(2, timeout_s=30), dist.get_rank()
    guard.record("submit", "a")
    guard.agree()
    for name in ("bc", "bc", "bc", "cb")[rank]:
        guard.record("submit", name)
    try:
        guard.agree()
    except EngineError as error:
        return str(error)[:40]
    return ""
