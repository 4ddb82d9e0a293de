"""The vLLM engine on CPU, judged by plain transformers forwards and by itself."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.engines.rollout.base import Completion, Request, SamplingParams, generate
from hybridflow.utils.errors import EngineError, StateError
from hybridflow.utils.seeding import derive_seed
from tests.integration.vllm.conftest import SIZES, changed, copy, distance, forward_log_probs, load_model, write
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-5
"""fp32: kernels of two libraries differ by summation order, about 2e-6 here; another weight version by 0.1 and more."""
PROMPTS = [[5, 9, 14], [7, 8, 9, 10, 11, 12, 13, 14, 15, 4, 5], [30], [21, 22, 23, 24, 25]]
LONG = [4 + (7 * i) % 48 for i in range(100)]
"""Three whole KV blocks and a piece."""


def request(index: int, prompt: list[int] | None = None, **settings) -> Request:
    return Request(
        request_id=str(index),
        prompt_ids=PROMPTS[index % len(PROMPTS)] if prompt is None else prompt,
        sampling=SamplingParams(**{"max_tokens": 12, **settings}),
        seed=derive_seed(0, index),
    )


def drain(engine) -> dict[str, Completion]:
    done = {}
    while engine.busy:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_plain_forward_of_the_written_weights(engine, model, temperature: float) -> None:
    other = changed(model)
    for done in generate(engine, [request(i, temperature=temperature) for i in range(4)]):
        prompt = PROMPTS[int(done.request_id)]
        assert distance(done.log_probs, forward_log_probs(model, prompt, done.token_ids, temperature)) <= TOLERANCE
        assert distance(done.log_probs, forward_log_probs(other, prompt, done.token_ids, temperature)) > 0.1


def test_log_probs_before_the_write_are_those_of_another_model(make_engine, folder, model) -> None:
    engine = make_engine(folder)
    assert engine.version == -1
    engine.submit([request(1)])
    with pytest.raises(StateError, match="published"):
        engine.step()
    engine.weights_written(0)  # a lie
    before = drain(engine)["1"]
    assert distance(before.log_probs, forward_log_probs(model, PROMPTS[1], before.token_ids)) > 0.1
    write(engine, model, 1)
    [after] = generate(engine, [request(1)])
    assert distance(after.log_probs, forward_log_probs(model, PROMPTS[1], after.token_ids)) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma", "gemma3"])
def test_other_families_agree_with_a_plain_forward(make_engine, tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family=family, tied=family.startswith("gemma"), **SIZES)
    model, engine = load_model(tmp_path), make_engine(tmp_path)
    write(engine, model, 0)
    for done in generate(engine, [request(i) for i in range(4)]):
        assert (
            distance(done.log_probs, forward_log_probs(model, PROMPTS[int(done.request_id)], done.token_ids))
            <= TOLERANCE
        )


def test_greedy_tokens_are_those_of_transformers_generate(engine, model) -> None:
    for done in generate(engine, [request(i, temperature=0.0) for i in range(4)]):
        prompt = torch.tensor([PROMPTS[int(done.request_id)]])
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert list(done.token_ids) == expected[0, prompt.shape[1] :].tolist()
        expected_log_probs = forward_log_probs(model, PROMPTS[int(done.request_id)], done.token_ids)
        assert distance(done.log_probs, expected_log_probs) <= TOLERANCE


def test_truncated_log_probs_are_renormalised(engine, model) -> None:
    [done] = generate(engine, [request(1, top_k=2)])
    for position, (token, log_prob) in enumerate(zip(done.token_ids, done.log_probs, strict=True)):
        with torch.no_grad():
            best = model(torch.tensor([[*PROMPTS[1], *done.token_ids[:position]]])).logits[0, -1].topk(2)
        kept = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
        assert abs(log_prob - kept[token]) <= TOLERANCE


def test_top_k_is_off_at_minus_one_zero_or_the_whole_vocabulary(engine) -> None:
    """D10: as in the reference engine."""
    [free] = generate(engine, [request(1)])
    for off in (-1, 0, 54):
        [done] = generate(engine, [request(1, top_k=off)])
        assert done.token_ids == free.token_ids
        assert distance(done.log_probs, free.log_probs) <= TOLERANCE


def test_neither_tokens_nor_log_probs_depend_on_company_or_order(engine) -> None:
    requests = [request(i, max_tokens=40) for i in range(8)]
    together = {done.request_id: done for done in generate(engine, requests)}
    alone = {one.request_id: generate(engine, [one])[0] for one in requests}
    backwards = {done.request_id: done for done in generate(engine, requests[::-1])}
    assert together == alone == backwards  # bit for bit: the kernels sum in one order whatever the number of rows
    assert len({done.token_ids for done in together.values()}) == 8


def test_tokens_are_the_same_when_a_response_is_computed_again_midway(engine) -> None:
    requests = [request(i, max_tokens=40) for i in range(4)]
    expected = generate(engine, requests)
    engine.submit(requests)
    for _ in range(17):
        engine.step()
    engine.clear_caches()  # what runs is computed again from its tokens: as many draws more, at the same positions
    done = drain(engine)
    assert [done[one.request_id].token_ids for one in requests] == [one.token_ids for one in expected]


def test_sampled_tokens_follow_the_distribution(engine, model) -> None:
    prompt = PROMPTS[0]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    requests = [replace(request(i, prompt, max_tokens=1), seed=derive_seed(1, i)) for i in range(4000)]
    first = torch.tensor([done.token_ids[0] for done in generate(engine, requests)])
    share = torch.bincount(first, minlength=len(expected)) / len(first)
    sigma = (expected * (1 - expected) / len(first)).sqrt()
    assert ((share - expected).abs() / sigma).max() < 5


def test_a_weight_change_between_steps_is_used_from_the_next_token_on(engine, model) -> None:
    other, prompts = changed(model), [*PROMPTS, LONG]
    engine.submit([request(i, prompts[i], max_tokens=30) for i in range(5)])
    for _ in range(13):
        assert engine.step() == []
    write(engine, other, 7)
    for one in drain(engine).values():
        before, after = (forward_log_probs(m, prompts[int(one.request_id)], one.token_ids) for m in (model, other))
        assert one.versions == (0,) * 13 + (7,) * 17
        assert distance(one.log_probs, before[:13] + after[13:]) <= TOLERANCE
        assert distance(before[13:], after[13:]) > 0.1


def test_a_cached_prefix_of_the_old_weights_is_never_used_with_new_ones(engine, model) -> None:
    other = changed(model)
    generate(engine, [request(0, LONG)])
    copy(engine, other)  # control: without a word to the engine the cache is stale, and the numbers are wrong
    [stale] = generate(engine, [request(0, LONG)])
    assert distance(stale.log_probs, forward_log_probs(other, LONG, stale.token_ids)) > 0.1
    engine.weights_written(1)
    [fresh] = generate(engine, [request(0, LONG)])
    assert distance(fresh.log_probs, forward_log_probs(other, LONG, fresh.token_ids)) <= TOLERANCE


def test_prompts_that_share_blocks_are_right(engine, model) -> None:
    for done in generate(engine, [request(i, LONG, max_tokens=4) for i in range(8)]):
        assert distance(done.log_probs, forward_log_probs(model, LONG, done.token_ids)) <= TOLERANCE


def test_more_prompt_tokens_than_a_step_takes_are_queued_whole(engine) -> None:
    # 16 seeded prompts of 100 tokens, 512 tokens a step: a prompt cut in two would crash the sampler's generators
    prompts = [LONG[i:] + LONG[:i] for i in range(16)]
    alone = [generate(engine, [request(i, prompts[i])])[0].token_ids for i in range(16)]
    engine.submit([request(i, prompts[i]) for i in range(16)])
    for _ in range(6):
        engine.step()
    engine.clear_caches()  # and all of them at once again
    done = drain(engine)
    assert [done[str(i)].token_ids for i in range(16)] == alone


def test_any_of_several_stop_ids_ends_a_response_and_belongs_to_it(engine) -> None:
    [free] = generate(engine, [request(1)])
    stops = (free.token_ids[4], 53)
    [done] = generate(engine, [request(1, stop_token_ids=stops)])
    cut = free.token_ids.index(free.token_ids[4]) + 1
    assert (done.token_ids, done.finish_reason) == (free.token_ids[:cut], "stop")
    [through] = generate(engine, [request(1, stop_token_ids=stops, ignore_eos=True)])
    assert (through.token_ids, through.finish_reason) == (free.token_ids, "length")


def test_a_cancelled_request_hands_out_its_partial_tokens(engine) -> None:
    expected = {done.request_id: done for done in generate(engine, [request(i) for i in range(4)])}
    engine.submit([request(i) for i in range(4)])
    for _ in range(5):
        engine.step()
    engine.submit([request(9)])
    partial, unstarted = engine.cancel(["1", "9", "unknown"])
    assert (partial.finish_reason, partial.token_ids) == ("abort", expected["1"].token_ids[:5])
    assert partial.log_probs == expected["1"].log_probs[:5]
    assert (unstarted.finish_reason, unstarted.token_ids) == ("abort", ())
    rest = drain(engine)
    assert {key: done.token_ids for key, done in rest.items()} == {k: expected[k].token_ids for k in ("0", "2", "3")}


def test_pieces_of_an_interrupted_response_add_up_to_its_limit(engine, model) -> None:
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
    [done] = generate(engine, [one])
    assert (len(done.token_ids), done.finish_reason, done.token_ids[:7]) == (10, "length", one.sampled_ids)
    assert distance(done.log_probs, forward_log_probs(model, PROMPTS[1], done.token_ids)) <= TOLERANCE
    [again] = generate(engine, [replace(one, sampling=replace(one.sampling, max_tokens=7))])
    assert (again.token_ids, again.finish_reason) == (one.sampled_ids, "length")


def test_a_sleeping_engine_refuses_to_step_and_to_be_written(engine, model) -> None:
    engine.sleep()
    for call in (engine.step, engine.parameters, lambda: engine.weights_written(1)):
        with pytest.raises(StateError, match="asleep"):
            call()
    engine.wake(["weights"])
    engine.weights_written(1)
    with pytest.raises(StateError, match="kv_cache asleep"):
        engine.step()
    engine.wake(["kv_cache"])
    assert generate(engine, [request(0)])[0].versions == (1,) * 12
    engine.sleep(level=2)
    engine.wake()
    assert engine.version == -1
    with pytest.raises(StateError, match="published"):
        engine.step()


def test_sleep_is_refused_while_requests_run(engine) -> None:
    engine.submit([request(0)])
    engine.step()
    with pytest.raises(StateError, match="running"):
        engine.sleep()


def test_sampling_defaults_of_the_model_folder_are_ignored(make_engine, folder, model, engine, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stubborn = {"repetition_penalty": 1.5, "top_k": 1, "temperature": 0.1, "eos_token_id": list(range(4, 50))}
    (tmp_path / "generation_config.json").write_text(json.dumps(stubborn))
    other = make_engine(tmp_path)
    write(other, model, 0)
    requests = [request(i) for i in range(4)]
    assert generate(other, requests) == generate(engine, requests)


def test_without_other_word_a_response_ends_at_any_end_id_of_the_model_folder(
    make_engine, folder, model, engine, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    [free] = generate(engine, [request(1)])
    ends = [3, free.token_ids[4]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    other = make_engine(tmp_path, eos_token_ids=None)
    write(other, model, 0)
    [done] = generate(other, [request(1)])
    assert (done.finish_reason, done.token_ids[-1]) == ("stop", free.token_ids[4])


def test_ids_beyond_the_vocabulary_limit_are_never_sampled(make_engine, folder, model, engine) -> None:
    limited = make_engine(folder, vocab_limit=20)
    write(limited, model, 0)
    free = generate(engine, [request(i, max_tokens=40) for i in range(4)])
    done = generate(limited, [request(i, max_tokens=40, temperature=float(i > 0)) for i in range(4)])
    assert max(max(one.token_ids) for one in free) >= 20
    assert max(max(one.token_ids) for one in done) < 20
    ids = torch.tensor([[*PROMPTS[1], *done[1].token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPTS[1]) - 1 : -1, :20]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(done[1].token_ids)[:, None])[:, 0].tolist()
    assert distance(done[1].log_probs, expected) <= TOLERANCE


@pytest.mark.parametrize("gemm", ["plain", "padded"])
def test_every_way_to_hold_weights_follows_every_write(make_engine, folder, model, gemm: str) -> None:
    engine = make_engine(folder, rollout={"engine_kwargs": {"vllm": {"cpu_gemm": gemm}}})
    for version, current in enumerate((model, changed(model))):
        write(engine, current, version)
        [done] = generate(engine, [request(1)])
        assert distance(done.log_probs, forward_log_probs(current, PROMPTS[1], done.token_ids)) <= TOLERANCE


def test_bf16_weights_give_bf16_log_probs(make_engine, folder, model) -> None:
    engine = make_engine(folder, rollout={"dtype": "bf16"})
    write(engine, model, 0)
    assert {part.view.dtype for part in engine.parameters().parts} == {torch.bfloat16}
    for done in generate(engine, [request(i) for i in range(4)]):
        off = distance(done.log_probs, forward_log_probs(model, PROMPTS[int(done.request_id)], done.token_ids))
        assert 0 < off < 0.1  # 8 bits of mantissa through two layers


def test_slices_land_where_vllms_own_loader_puts_them(make_engine, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family="qwen2", tied=True, **SIZES)
    model, engine = load_model(tmp_path), make_engine(tmp_path)
    copy(engine, model)
    inner = engine._model()
    ours = {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}
    for parameter in inner.parameters():
        parameter.data.zero_()
    inner.load_weights((name, parameter.data) for name, parameter in model.named_parameters())
    for name, parameter in inner.named_parameters():
        assert torch.equal(parameter, ours[name]), name


def test_parameters_name_every_hugging_face_parameter_once_at_its_full_shape(engine, model) -> None:
    parameters = engine.parameters()
    assert {p.hf_name: p.hf_shape for p in parameters.parts} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert len(parameters.parts) == len({part.hf_name for part in parameters.parts})
    assert (
        parameters.engine_names["model.layers.0.self_attn.k_proj.weight"] == "model.layers.0.self_attn.qkv_proj.weight"
    )
    embedding = dict(engine._model().named_parameters())["model.embed_tokens.weight"]
    assert embedding.shape[0] == 64
    assert not embedding[54:].any()


def test_building_an_engine_leaves_the_hosts_random_state_and_threads_alone(make_engine, folder) -> None:
    def draws() -> tuple:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    set_num_threads = torch.set_num_threads
    make_engine(folder)
    assert draws() == expected
    assert torch.set_num_threads is set_num_threads


def test_a_request_that_cannot_be_served_is_refused_and_nothing_is_queued(engine) -> None:
    with pytest.raises(EngineError, match="'1'.*context"):
        engine.submit([request(0), request(1, [5] * 192)])
    with pytest.raises(EngineError, match="'0' is already running"):
        engine.submit([request(0), request(0)])
    assert not engine.busy


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cpu_gemm": "fast"}, "cpu_gemm.*padded"),
        ({"logprobs_mode": "raw_logprobs"}, "may not set logprobs_mode"),
        ({"max_num_sequences": 3}, "no argument max_num_sequences"),
        ({"enable_chunked_prefill": True}, "crash"),
    ],
)
def test_engine_options_that_would_give_wrong_numbers_are_refused(
    make_engine, folder, options: dict, named: str
) -> None:
    with pytest.raises(EngineError, match=named):
        make_engine(folder, rollout={"engine_kwargs": {"vllm": options}})


def test_head_sizes_without_a_kernel_are_refused_before_the_first_step(make_engine, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    with pytest.raises(EngineError, match="heads of 16"):
        make_engine(tmp_path)


def test_memory_is_counted_once_for_tied_weights(engine) -> None:
    held = engine.memory_bytes()
    parameters = dict(engine._model().named_parameters())
    assert held["weights"] == sum(parameter.nbytes for parameter in parameters.values())
    assert held["kv_cache"] > 0
