"""The reference engine against plain transformers: one sequence, one forward, no cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridflow.config.actor import RolloutConfig
from hybridflow.engines.rollout.base import Completion, Request, SamplingParams, generate
from hybridflow.engines.rollout.hf import HFEngine
from hybridflow.utils.errors import EngineError, StateError
from hybridflow.utils.seeding import derive_seed
from tests.tiny import VOCABULARY, save_tiny_model

PROMPTS = [[5, 9, 14], [7, 8, 9, 10, 11, 12, 13, 14, 15, 4, 5], [30], [21, 22, 23, 24, 25]]
LOG_PROB_TOLERANCE = 1e-5
"""fp32 on one machine: a cached, padded forward against a plain one differs by summation order, about 1e-6 here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_engine(folder: Path, model: PreTrainedModel, *, version: int | None = 0, **arguments) -> HFEngine:
    engine = HFEngine(
        **{
            "model_path": str(folder),
            "config": RolloutConfig(name="hf"),
            "max_prompt_tokens": 32,
            "max_response_tokens": 64,
            "tp": 1,
            "device": "cpu",
            "eos_token_ids": (),
            **arguments,
        }
    )
    if version is not None:
        write(engine, model, version)
    return engine


@pytest.fixture
def engine(folder: Path, model: PreTrainedModel) -> HFEngine:
    return make_engine(folder, model)


def write(engine: HFEngine, model: PreTrainedModel, version: int) -> None:
    weights = dict(model.named_parameters())
    for part in engine.parameters().parts:
        part.view.copy_(weights[part.hf_name].data)
    engine.weights_written(version)


def changed(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with every weight moved."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return other


def request(index: int, **settings) -> Request:
    return Request(
        request_id=str(index),
        prompt_ids=PROMPTS[index % len(PROMPTS)],
        sampling=SamplingParams(**{"max_tokens": 12, **settings}),
        seed=derive_seed(0, index),
    )


@torch.no_grad()
def forward_log_probs(model: PreTrainedModel, prompt: list[int], tokens: tuple[int, ...], temperature: float = 1.0):
    ids = torch.tensor([[*prompt, *tokens]])
    log_probs = (model(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_one_plain_forward(engine: HFEngine, model: PreTrainedModel, temperature: float) -> None:
    for done in generate(engine, [request(i, temperature=temperature) for i in range(4)]):
        expected = forward_log_probs(model, PROMPTS[int(done.request_id)], done.token_ids, temperature)
        assert done.log_probs == pytest.approx(expected, abs=LOG_PROB_TOLERANCE)


def test_log_probs_before_the_weights_are_written_are_those_of_another_model(
    folder: Path, model: PreTrainedModel
) -> None:
    engine = make_engine(folder, model, version=None, seed=99)
    engine.weights_written(0)
    [done] = generate(engine, [request(1)])
    expected = forward_log_probs(model, PROMPTS[1], done.token_ids)
    assert max(abs(a - b) for a, b in zip(done.log_probs, expected, strict=True)) > 0.1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_other_families_agree_with_a_plain_forward(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family=family, tied=False)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for done in generate(make_engine(tmp_path, other), [request(i) for i in range(4)]):
        expected = forward_log_probs(other, PROMPTS[int(done.request_id)], done.token_ids)
        assert done.log_probs == pytest.approx(expected, abs=LOG_PROB_TOLERANCE)


def test_greedy_tokens_are_those_of_transformers_generate(engine: HFEngine, model: PreTrainedModel) -> None:
    for done in generate(engine, [request(i, temperature=0.0) for i in range(4)]):
        prompt = torch.tensor([PROMPTS[int(done.request_id)]])
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert list(done.token_ids) == expected[0, prompt.shape[1] :].tolist()


def test_tokens_do_not_depend_on_the_company_of_a_request(engine: HFEngine) -> None:
    requests = [request(i) for i in range(4)]
    together = {done.request_id: done.token_ids for done in generate(engine, requests)}
    alone = {one.request_id: generate(engine, [one])[0].token_ids for one in requests}
    backwards = {done.request_id: done.token_ids for done in generate(engine, requests[::-1])}
    assert together == alone == backwards
    assert len(set(together.values())) == 4


def test_tokens_do_not_depend_on_when_a_request_arrives(engine: HFEngine) -> None:
    expected = {done.request_id: done.token_ids for done in generate(engine, [request(i) for i in range(4)])}
    engine.submit([request(0), request(1)])
    early = engine.step() + engine.step()
    late = {done.request_id: done.token_ids for done in generate(engine, [request(2), request(3)])}
    assert early == []
    assert late == {key: expected[key] for key in ("2", "3")}


def test_no_more_than_max_num_seqs_run_at_once(folder: Path, model: PreTrainedModel) -> None:
    expected = generate(make_engine(folder, model), [request(i) for i in range(4)])
    narrow = make_engine(folder, model, config=RolloutConfig(name="hf", max_num_seqs=2))
    narrow.submit([request(i, max_tokens=1) for i in range(4)])
    assert [len(narrow.step()), len(narrow.step()), narrow.busy] == [2, 2, False]
    assert [d.token_ids for d in generate(narrow, [request(i) for i in range(4)])] == [d.token_ids for d in expected]


def test_another_seed_gives_other_tokens(engine: HFEngine) -> None:
    [one] = generate(engine, [request(1)])
    [other] = generate(engine, [replace(request(1), seed=123)])
    assert one.token_ids != other.token_ids


def test_truncated_log_probs_are_renormalised(engine: HFEngine, model: PreTrainedModel) -> None:
    [done] = generate(engine, [request(1, top_k=2)])
    for position, (token, log_prob) in enumerate(zip(done.token_ids, done.log_probs, strict=True)):
        ids = torch.tensor([[*PROMPTS[1], *done.token_ids[:position]]])
        with torch.no_grad():
            best = model(ids).logits[0, -1].topk(2)
        kept = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
        assert log_prob == pytest.approx(kept[token], abs=LOG_PROB_TOLERANCE)


def test_ids_beyond_the_vocabulary_limit_are_never_sampled(folder: Path, model: PreTrainedModel) -> None:
    free = generate(make_engine(folder, model), [request(i, max_tokens=40) for i in range(4)])
    limited = generate(make_engine(folder, model, vocab_limit=20), [request(i, max_tokens=40) for i in range(4)])
    assert max(max(done.token_ids) for done in free) >= 20
    assert max(max(done.token_ids) for done in limited) < 20


def first_tokens(engine: HFEngine) -> tuple[int, ...]:
    return generate(engine, [request(1)])[0].token_ids


@pytest.mark.parametrize("position", [2, 5])
def test_any_of_several_stop_ids_ends_a_response_and_belongs_to_it(engine: HFEngine, position: int) -> None:
    tokens = first_tokens(engine)
    stops = (tokens[position], max(VOCABULARY.values()))
    [done] = generate(engine, [request(1, stop_token_ids=stops)])
    cut = tokens.index(tokens[position]) + 1
    assert (done.token_ids, done.finish_reason) == (tokens[:cut], "stop")


def test_end_ids_of_the_engine_end_every_response(folder: Path, model: PreTrainedModel, engine: HFEngine) -> None:
    tokens = first_tokens(engine)
    with_end = make_engine(folder, model, eos_token_ids=(tokens[3],))
    [done] = generate(with_end, [request(1)])
    assert (done.token_ids, done.finish_reason) == (tokens[: tokens.index(tokens[3]) + 1], "stop")
    [through] = generate(with_end, [request(1, ignore_eos=True, stop_token_ids=(tokens[0],))])
    assert (through.token_ids, through.finish_reason) == (tokens, "length")


def test_a_cancelled_request_hands_out_its_partial_tokens(engine: HFEngine) -> None:
    expected = {done.request_id: done for done in generate(engine, [request(i) for i in range(4)])}
    engine.submit([request(i) for i in range(4)])
    for _ in range(5):
        engine.step()
    [partial] = engine.cancel(["1", "unknown"])
    assert (partial.finish_reason, partial.token_ids) == ("abort", expected["1"].token_ids[:5])
    rest: list[Completion] = []
    while engine.busy:
        rest += engine.step()
    assert {done.request_id: done.token_ids for done in rest} == {k: expected[k].token_ids for k in ("0", "2", "3")}
    assert engine.cancel(["1"]) == []


def test_a_request_cancelled_before_its_first_step_has_no_tokens(engine: HFEngine) -> None:
    engine.submit([request(0)])
    assert [(d.token_ids, d.finish_reason) for d in engine.cancel(["0"])] == [((), "abort")]
    assert not engine.busy


def test_pieces_of_an_interrupted_response_add_up_to_its_limit(engine: HFEngine, model: PreTrainedModel) -> None:
    one = request(1, max_tokens=10)
    for steps in (4, 3):
        engine.submit([one])
        for _ in range(steps):
            engine.step()
        [partial] = engine.cancel(["1"])
        one = replace(
            one,
            sampled_ids=partial.token_ids,
            sampled_log_probs=partial.log_probs,
            sampled_versions=partial.versions,
        )
    assert len(one.sampled_ids) == 7
    [done] = generate(engine, [one])
    assert (len(done.token_ids), done.finish_reason, done.token_ids[:7]) == (10, "length", one.sampled_ids)
    assert done.log_probs == pytest.approx(forward_log_probs(model, PROMPTS[1], done.token_ids), abs=LOG_PROB_TOLERANCE)


def test_a_request_that_is_already_complete_comes_back_at_the_next_step(engine: HFEngine) -> None:
    full = replace(
        request(0, max_tokens=2), sampled_ids=(4, 5), sampled_log_probs=(-1.0, -2.0), sampled_versions=(0, 0)
    )
    [done] = generate(engine, [full])
    assert (done.token_ids, done.log_probs, done.finish_reason) == ((4, 5), (-1.0, -2.0), "length")


def test_a_weight_change_between_steps_is_used_from_the_next_token_on(engine: HFEngine, model: PreTrainedModel) -> None:
    other = changed(model)
    engine.submit([request(i) for i in range(4)])
    for _ in range(5):
        engine.step()
    write(engine, other, 1)
    done: list[Completion] = []
    while engine.busy:
        done += engine.step()
    for one in done:
        prompt = PROMPTS[int(one.request_id)]
        before, after = (forward_log_probs(m, prompt, one.token_ids) for m in (model, other))
        assert one.versions == (0,) * 5 + (1,) * 7
        assert one.log_probs == pytest.approx(before[:5] + after[5:], abs=LOG_PROB_TOLERANCE)
        assert max(abs(a - b) for a, b in zip(before[5:], after[5:], strict=True)) > 0.1


def test_an_engine_without_published_weights_refuses_to_step(folder: Path, model: PreTrainedModel) -> None:
    engine = make_engine(folder, model, version=None)
    assert engine.version == -1
    engine.submit([request(0)])
    with pytest.raises(StateError, match="published"):
        engine.step()


def test_a_sleeping_engine_refuses_to_step_and_to_be_written(engine: HFEngine, model: PreTrainedModel) -> None:
    engine.sleep()
    for call in (engine.step, engine.parameters, lambda: engine.weights_written(1)):
        with pytest.raises(StateError, match="asleep"):
            call()
    engine.wake(["weights"])
    engine.parameters()
    with pytest.raises(StateError, match="kv_cache asleep"):
        engine.step()
    engine.wake(["kv_cache"])
    assert len(generate(engine, [request(0)])[0].token_ids) == 12


def test_a_deep_sleep_forgets_the_weights(engine: HFEngine, model: PreTrainedModel) -> None:
    engine.sleep(level=2)
    engine.wake()
    with pytest.raises(StateError, match="published"):
        engine.step()
    write(engine, model, 4)
    assert engine.version == 4
    assert generate(engine, [request(0)])[0].versions == (4,) * 12


def test_sleep_is_refused_while_requests_run(engine: HFEngine) -> None:
    engine.submit([request(0)])
    with pytest.raises(StateError, match="running"):
        engine.sleep()


def test_a_request_id_can_not_run_twice(engine: HFEngine) -> None:
    engine.submit([request(0)])
    with pytest.raises(EngineError, match="'0' is already running"):
        engine.submit([request(1), request(0)])
    assert [done.request_id for done in engine.cancel(["0", "1"])] == ["0"]


def test_cache_bytes_are_zero_when_nothing_runs(engine: HFEngine) -> None:
    held = engine.memory_bytes()
    assert held["kv_cache"] == 0
    assert held["weights"] == sum(part.view.nbytes for part in engine.parameters().parts)
    engine.submit([request(0)])
    engine.step()
    assert engine.memory_bytes()["kv_cache"] > 0
    engine.clear_caches()
    assert engine.memory_bytes()["kv_cache"] == 0


def test_tied_weights_appear_once(engine: HFEngine) -> None:
    names = [part.hf_name for part in engine.parameters().parts]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_more_than_one_tensor_parallel_rank_is_refused(folder: Path, model: PreTrainedModel) -> None:
    with pytest.raises(EngineError, match="tensor_model_parallel_size=2"):
        make_engine(folder, model, tp=2)
