"""Law: after every optimizer step and its publish, vLLM's log-probs are the trainer's; so with requests in flight.

Gloo ranks train with FSDP2 and generate with real vLLM: one rank alone, one engine over two ranks (tp=2), or one engine
on each of two. Greedy tokens would not tell weights apart, so log-probs of sampled tokens are compared, with those
before the publish as a negative control.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig

from hybridflow.batch.batch import Batch
from hybridflow.config.actor import RolloutConfig
from hybridflow.engines.rollout.base import Completion, Request, SamplingParams, generate
from hybridflow.hybrid_engine.layouts import TrainingLayout
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.hybrid_engine.start_check import check_layout
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import EngineError, StateError
from hybridflow.utils.seeding import derive_seed
from tests.integration.vllm.conftest import SIZES, distance, forward_log_probs, load_model
from tests.invariants.training_steps import LOSSES, Case, build, make_rows, own_rows
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-5
STEPS = 4
PROMPTS = [[5, 9, 14], [7, 8, 9, 10, 11, 12, 13, 14, 15, 4, 5], [30], [21, 22, 23, 24, 25]]
LONG = [4 + (7 * i) % 48 for i in range(100)]
"""Three whole KV blocks and a piece."""
ADAM = {"optimizer": "AdamW", "lr": 1e-2}
CUT = 6
"""Tokens sampled before the weights change."""


def requests(seed: int, prompts: list[list[int]] = PROMPTS, max_tokens: int = 16) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [
        Request(request_id=str(i), prompt_ids=prompt, sampling=sampling, seed=derive_seed(seed, i))
        for i, prompt in enumerate(prompts)
    ]


def build_engine(folder: str, tp: int) -> Any:
    from hybridflow.engines.rollout.vllm import VLLMEngine

    return VLLMEngine(
        model_path=folder,
        config=RolloutConfig(max_num_seqs=8, max_num_batched_tokens=512),
        max_prompt_tokens=128,
        max_response_tokens=64,
        tp=tp,
        device="cpu",
        eos_token_ids=(),
        lockstep_timeout_s=60.0,
    )


class Pair:
    """Trainer and generator of this rank."""

    def __init__(self, folder: str, tp: int) -> None:
        layout = TrainingLayout.for_rollout(ParallelDims(dp_shard=dist.get_world_size()), tp)
        engine = {"shard_order": layout.rank_order, "row_parallel_shard_dim1": layout.row_parallel_shard_dim1}
        self.case = Case(folder, dims=layout.dims, optim=ADAM, engine={**engine, "grad_clip": 1.0})
        self.trainer = build(self.case)
        self.engine = build_engine(folder, tp)
        self.tp = tp
        self.in_flight: Any = "recompute"
        self.break_at = ""
        self.forgotten: tuple[Any, Any] | None = None
        self.publisher = Publisher(
            self.shards,
            self.engine.parameters,
            self.written,
            verify="always",
            attempts=1,
            stale_copies=self.engine.stale_copies,
        )
        self.updates = 0
        self.is_last = dist.get_rank() == dist.get_world_size() - 1

    def shards(self) -> list:
        """The trainer's; the one that is to break has no data to read."""
        return [
            replace(shard, local=shard.local.to("meta")) if shard.name == self.break_at else shard
            for shard in self.trainer.shards()
        ]

    def written(self, version: int) -> None:
        self.engine.weights_written(version, self.in_flight)
        if self.forgotten is not None:  # as if this layer's copy had not been packed again
            layer, layer.cpu_linear = self.forgotten

    def update(self) -> None:
        rows = own_rows(make_rows(8, seed=self.updates), self.case.dims, dist.get_rank())
        counts = self.trainer.counts(rows)
        self.trainer.update(rows, LOSSES["lm"], temperature=1.0, micro=self.case.micro, counts=counts)
        self.updates += 1

    def off(self, done: list[Completion]) -> float:
        """Largest distance between the sampler's log-probs and those of the trainer as it is now."""
        width = max(len(one.token_ids) for one in done)
        prompts = [PROMPTS[int(one.request_id)] for one in done]
        rows = Batch(
            {
                "prompt_ids": torch.tensor([[*prompt, *[0] * (16 - len(prompt))] for prompt in prompts]),
                "prompt_length": torch.tensor([len(prompt) for prompt in prompts]),
                "response_ids": torch.tensor([one.token_ids for one in done]),
                "response_length": torch.full((len(done),), width),
            }
        )
        needs = frozenset({"log_probs"})
        found = self.trainer.forward(rows, needs, temperature=1.0, micro=self.case.micro)["log_probs"]
        return float((found - torch.tensor([one.log_probs for one in done])).abs().max())

    def saved(self, folder: Path) -> Any:
        """transformers' own model of the trainer's weights."""
        self.trainer.save_hf(str(folder))
        dist.barrier()
        return load_model(folder)


def several_steps(pair: Pair) -> dict[str, Any]:
    """Publish, sample, train, sample again (control), and so on."""
    found: dict[str, Any] = {"after": [], "control": [], "ratio": [], "versions": set()}
    for step in range(STEPS):
        metrics = pair.publisher.publish(step)
        found["ratio"].append(metrics["publish/ratio_to_bound"])
        done = generate(pair.engine, requests(step))
        found["versions"] |= {version for one in done for version in one.versions}
        found["after"].append(pair.off(done))
        pair.update()
        found["control"].append(pair.off(generate(pair.engine, requests(step))))
    return found


def published_midway(pair: Pair, version: int, in_flight: str) -> list[Completion]:
    """What was generated while the first rank's word brought new weights after the step of token ``CUT``."""
    pair.in_flight = in_flight
    steps = 0

    def between_steps() -> None:
        nonlocal steps
        steps += 1
        if steps == CUT - 1 and dist.get_rank() % pair.tp == 0:
            pair.engine.announce(version)
        if pair.engine.announced > pair.engine.version:
            pair.publisher.publish(version)

    return generate(pair.engine, requests(version, [*PROMPTS, LONG]), between_steps=between_steps)


def in_flight(pair: Pair, folder: Path) -> dict[str, Any]:
    """Every choice in turn, against plain forwards of the old and the new weights."""
    found: dict[str, Any] = {}
    prompts = [*PROMPTS, LONG]
    version = 10
    pair.publisher.publish(version)
    new = pair.saved(folder / "first")
    for choice in ("recompute", "keep", "abort"):
        old = new
        pair.update()
        new = pair.saved(folder / choice)
        version += 1
        done = published_midway(pair, version, choice)
        if choice == "abort":
            found["aborted"] = [(one.finish_reason, len(one.token_ids)) for one in done]
            again = [
                replace(
                    request,
                    sampled_ids=one.token_ids,
                    sampled_log_probs=one.log_probs,
                    sampled_versions=one.versions,
                )
                for request, one in zip(requests(version, prompts), done, strict=True)
            ]
            done = generate(pair.engine, again)
        distances = []
        for one in done:
            prompt = prompts[int(one.request_id)]
            before, after = (forward_log_probs(model, prompt, one.token_ids) for model in (old, new))
            distances.append(
                {
                    "old": distance(one.log_probs[:CUT], before[:CUT]),
                    "new": distance(one.log_probs[CUT:], after[CUT:]),
                    "apart": distance(before[CUT:], after[CUT:]),
                }
            )
        found[choice] = distances
        found[f"{choice} versions"] = {one.versions for one in done}
        found[f"{choice} version"] = version
        [fresh] = generate(pair.engine, requests(99, [LONG], max_tokens=4))
        found[f"{choice} fresh"] = distance(fresh.log_probs, forward_log_probs(new, LONG, fresh.token_ids))
    pair.in_flight = "recompute"
    return found


def broken_midway(pair: Pair) -> dict[str, Any]:
    """A publish that breaks with requests in flight, and the one after it."""
    pair.publisher.publish(20)
    pair.engine.submit(requests(20))
    pair.engine.step()
    pair.update()
    pair.break_at = "model.layers.1.self_attn.o_proj.weight" if pair.is_last else ""
    found = {"publish": _failure(lambda: pair.publisher.publish(21)), "step": _failure(pair.engine.step)}
    pair.break_at = ""
    pair.publisher.publish(22)
    done: list[Completion] = []
    while pair.engine.busy:
        done += pair.engine.step()
    found["versions"] = {one.versions for one in done}
    found["tokens"] = len(done)
    return found


def drifted(pair: Pair) -> dict[str, Any]:
    """One weight of the last rank's engine changes by itself; a storage is replaced behind the publisher's back."""
    pair.publisher.publish(30)
    inner = dict(pair.engine._model().named_parameters())
    weight = inner["model.layers.1.mlp.down_proj.weight"]
    if pair.is_last:
        weight.data[3, 5] += 1e-3
    found: dict[str, Any] = {"drift": _failure(lambda: pair.publisher.publish(31))}
    weight.data = weight.data.clone() + 1
    pair.publisher.publish(32)
    found["moved storage"] = pair.off(generate(pair.engine, requests(32)))
    return found


def stale(pair: Pair) -> dict[str, Any]:
    """On the last rank, the packed copy of one layer stays that of the weights before."""
    pair.publisher.publish(40)
    layer: Any = pair.engine._model().get_submodule("model.layers.1.mlp.gate_up_proj")
    pair.forgotten = (layer, layer.cpu_linear) if pair.is_last else None
    pair.update()
    found = {"publish": _failure(lambda: pair.publisher.publish(41)), "step": _failure(pair.engine.step)}
    pair.forgotten = None
    pair.publisher.publish(42)
    found["next"] = pair.off(generate(pair.engine, requests(42)))
    return found


def experts(folder: str, scratch: Path, tp: int) -> dict[str, Any]:
    """A mixture of experts, whose folder has them one by one: trained, published, exported."""
    pair = Pair(folder, tp)
    assert check_layout(
        pair.engine.parameters(), AutoConfig.from_pretrained(folder), tp=tp, tp_rank=dist.get_rank() % tp
    )
    return {"steps": several_steps(pair), "export": read_by_vllm(pair, scratch / "experts")}


def read_by_vllm(pair: Pair, folder: Path) -> dict[str, Any]:
    """What vLLM's own loader makes of the exported folder, against what a publish has written."""
    pair.publisher.publish(50)
    pair.trainer.save_hf(str(folder))
    dist.barrier()
    stored, parts = load_file(folder / "model.safetensors"), pair.engine.parameters().parts
    published = [part.view.clone() for part in parts]
    with torch.no_grad():
        for part in parts:
            part.view.zero_()
        inner: Any = pair.engine._model()
        inner.load_weights(stored.items())
    names = [part.hf_name for part, want in zip(parts, published, strict=True) if not torch.equal(part.view, want)]
    return {"differ": names, "stored": set(stored), "parts": {part.hf_name for part in parts}}


def _failure(action: Any) -> str:
    try:
        action()
    except (EngineError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def layout_word(pair: Pair, folder: str, tp: int) -> list[str]:
    """What the start-up check says of the right and of the wrong coordinate."""
    config, parameters = AutoConfig.from_pretrained(folder), pair.engine.parameters()
    at = dist.get_rank() % tp
    assert check_layout(parameters, config, tp=tp, tp_rank=at)
    return [_failure(lambda: check_layout(parameters, config, tp=2, tp_rank=1 - at))]


def train_and_generate(folder: str, of_experts: str, scratch: str, tp: int) -> dict[str, Any]:
    with_experts = experts(of_experts, Path(scratch), tp)  # first: vLLM makes its groups once, those of experts too
    pair = Pair(folder, tp)
    return {
        "experts": with_experts,
        "layout": layout_word(pair, folder, tp),
        "steps": several_steps(pair),
        "in flight": in_flight(pair, Path(scratch)),
        "broken": broken_midway(pair),
        "drift": drifted(pair),
        "stale": stale(pair),
    }


CASES = [
    pytest.param((1, 1), id="one rank"),
    pytest.param((2, 2), id="tp 2"),
    pytest.param((2, 1), id="two replicas", marks=pytest.mark.slow),
]
"""Ranks, and tensor-parallel size of an engine. vLLM keeps its groups per process: a case has processes of its own."""


@pytest.fixture(scope="module", params=CASES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    world, tp = request.param
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"), **SIZES)
    of_experts = save_tiny_model(tmp_path_factory.mktemp("experts"), family="qwen3_moe", tied=False, **SIZES)
    scratch = tmp_path_factory.mktemp("saved")
    return run_ranks(world, train_and_generate, str(folder), str(of_experts), str(scratch), tp, deadline_s=170)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_after_every_optimizer_step_the_samplers_log_probs_are_the_trainers(found, kind: str) -> None:
    for rank in found:
        steps = rank["steps"] if kind == "dense" else rank["experts"]["steps"]
        assert max(steps["after"]) <= TOLERANCE
        assert min(steps["control"]) > 100 * TOLERANCE
        assert steps["versions"] == set(range(STEPS))
        assert steps["ratio"] == [1.0] * STEPS


def test_weights_published_between_two_steps_are_used_from_the_next_token_on(found) -> None:
    for rank in found:
        flight = rank["in flight"]
        for choice in ("recompute", "abort"):
            version = flight[f"{choice} version"]
            assert flight[f"{choice} versions"] == {(version - 1,) * CUT + (version,) * (16 - CUT)}
            for distances in flight[choice]:
                assert distances["old"] <= TOLERANCE
                assert distances["new"] <= TOLERANCE
                assert distances["apart"] > 100 * TOLERANCE
            assert flight[f"{choice} fresh"] <= TOLERANCE
        assert flight["aborted"] == [("abort", CUT)] * 5


def test_kept_keys_and_values_are_of_the_old_weights_and_no_other_request_sees_them(found) -> None:
    for rank in found:
        flight = rank["in flight"]
        version = flight["keep version"]
        assert flight["keep versions"] == {(version - 1,) * CUT + (version,) * (16 - CUT)}
        assert max(distances["old"] for distances in flight["keep"]) <= TOLERANCE
        assert max(distances["new"] for distances in flight["keep"]) > 10 * TOLERANCE
        assert flight["keep fresh"] <= TOLERANCE


def test_a_publish_that_breaks_stops_generation_until_the_next_one(found) -> None:
    for rank in found:
        broken = rank["broken"]
        assert f"rank {len(found) - 1}: NotImplementedError" in broken["publish"]
        assert broken["step"].startswith("StateError: step: the engine holds no published weights")
        assert broken["versions"] == {(20,) + (22,) * 15}
        assert broken["tokens"] == len(PROMPTS)


def test_weights_that_change_by_themselves_are_named_and_a_new_storage_is_found(found) -> None:
    for rank in found:
        drift = rank["drift"]
        assert "the generator's weights changed since the last publish, and not by one" in drift["drift"]
        [line] = drift["drift"].splitlines()[1:]
        assert line.startswith("model.layers.1.mlp.down_proj.weight") and f"on generator rank {len(found) - 1}" in line
        assert drift["moved storage"] <= TOLERANCE


def test_a_packed_copy_that_was_not_renewed_is_named_and_no_token_comes_from_it(found) -> None:
    for rank in found:
        failure = rank["stale"]["publish"]
        assert "the generator does not compute with the weights that it holds" in failure
        lines = [line for line in failure.splitlines() if "packed copy is not of" in line]
        assert [line.partition(" ")[0] for line in lines] == [
            f"model.layers.1.mlp.{half}_proj.weight" for half in ("gate", "up")
        ]
        assert all(line.endswith(f"on generator rank {len(found) - 1}") for line in lines)
        assert rank["stale"]["step"].startswith("StateError: step: the engine holds no published weights")
        assert rank["stale"]["next"] <= TOLERANCE


def test_an_exported_mixture_of_experts_is_read_by_vllm_as_it_was_published(found) -> None:
    for rank in found:
        export = rank["experts"]["export"]
        assert export["differ"] == []
        assert "model.layers.1.mlp.experts.3.up_proj.weight" in export["stored"]
        assert "model.layers.1.mlp.experts.gate_up_proj" in export["parts"]


def test_the_layout_that_vllm_stores_is_the_one_that_the_rules_predict(found) -> None:
    for rank in found:
        [wrong] = rank["layout"]
        assert "does not store Qwen2ForCausalLM as the sharding rules predict; nothing was written" in wrong
        assert "model.layers.0.self_attn.q_proj.weight: the rule 'query' predicts" in wrong
