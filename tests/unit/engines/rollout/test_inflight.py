"""Rules that both rollout engines share."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hybridflow.engines.rollout.base import Request, SamplingParams
from hybridflow.engines.rollout.inflight import drawing_seed, end_token_ids, open_response, sampled_log_probs
from hybridflow.utils.errors import EngineError

REQUEST = Request(
    request_id="a", prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=4, stop_token_ids=(7, 9)), seed=1
)
LIMITS = {"eos_token_ids": (1,), "max_model_len": 8, "vocab_size": 10}


def finish_after(*token_ids: int, **sampling) -> str | None:
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, **sampling))
    response = open_response(request, **LIMITS)
    for token_id in token_ids:
        response.append(token_id, -1.0, 0)
    return response.finish_reason


@pytest.mark.parametrize("end", [1, 7, 9])
def test_every_end_id_ends_a_response(end: int) -> None:
    assert finish_after(3) is None
    assert finish_after(3, end) == "stop"


def test_a_response_without_end_id_stops_at_its_length() -> None:
    assert finish_after(3, 4, 5, 6) == "length"


def test_an_end_id_as_last_allowed_token_is_a_stop() -> None:
    assert finish_after(3, 4, 5, 9) == "stop"


def test_ignore_eos_runs_through_end_ids() -> None:
    assert finish_after(7, 1, 9, ignore_eos=True) is None


def test_the_limit_is_clamped_to_the_context() -> None:
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=100))
    assert open_response(request, **LIMITS).max_tokens == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt_ids": ()}, "prompt_ids"),
        ({"prompt_ids": (3,) * 8}, "context"),
        ({"prompt_ids": (3, 10)}, "token ids"),
        ({"seed": 1 << 31}, "seed"),
        ({"sampled_ids": (3,)}, "sampled_log_probs"),
        ({"sampling": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"sampling": SamplingParams(max_tokens=4, temperature=-1.0)}, "temperature"),
        ({"sampling": SamplingParams(max_tokens=4, temperature=1e-3)}, "temperature"),
        ({"sampling": SamplingParams(max_tokens=4, top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(max_tokens=4, top_k=-2)}, "top_k"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(EngineError, match=f"'a'.*{named}"):
        open_response(replace(REQUEST, **change), **LIMITS)


def test_a_continuation_never_draws_from_the_seed_of_its_first_try() -> None:
    later = [
        replace(REQUEST, sampled_ids=(3,) * n, sampled_log_probs=(0.0,) * n, sampled_versions=(0,) * n)
        for n in range(3)
    ]
    assert drawing_seed(later[0]) == REQUEST.seed
    assert len({drawing_seed(request) for request in later}) == 3


def test_end_ids_are_the_union_of_both_files_of_a_model_folder(tmp_path) -> None:
    assert end_token_ids(str(tmp_path)) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert end_token_ids(str(tmp_path)) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert end_token_ids(str(tmp_path)) == (2, 7)


def test_the_log_prob_of_the_sampled_token_is_found_by_its_id() -> None:
    """D04: candidates 5 and 9 in either order, 9 was sampled; without it there is an error, never a 0."""
    assert sampled_log_probs([9, 9], [[5, 9], [9, 5]], [[-0.1, -3.0], [-3.0, -0.1]]) == [-3.0, -3.0]
    with pytest.raises(EngineError, match=r"token 7 .* \[5, 9\]"):
        sampled_log_probs([7], [[5, 9]], [[-0.1, -3.0]])
