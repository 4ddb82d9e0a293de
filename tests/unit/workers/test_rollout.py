"""Completions become columns without guessing: lengths and reasons are the engine's."""

from __future__ import annotations

import itertools

from hybridflow.engines.rollout.base import Completion
from hybridflow.utils.seeding import derive_seed
from hybridflow.workers.rollout import WRITES, to_columns


def _completion(ids: tuple[int, ...], reason: str = "stop") -> Completion:
    return Completion(
        request_id="0",
        token_ids=ids,
        log_probs=tuple(-0.5 * i for i in range(len(ids))),
        versions=(3,) * len(ids),
        finish_reason=reason,
    )


def test_columns_hold_ids_mask_versions_and_log_probs_of_each_response():
    batch = to_columns([_completion((5, 0, 1)), _completion((7,), "length")])
    assert set(batch.names) == set(WRITES)
    assert batch["response_ids"].tolist() == [[5, 0, 1], [7, 0, 0]]
    assert batch["response_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["rollout_log_probs"].tolist() == [[0.0, -0.5, -1.0], [0.0, 0.0, 0.0]]
    assert batch["weight_version"].tolist() == [[3, 3, 3], [3, -1, -1]]
    assert batch.objects("finish_reason") == ("stop", "length")


def test_a_sampled_pad_id_is_a_token_like_any_other():
    assert to_columns([_completion((0, 0, 1))])["response_mask"].tolist() == [[True, True, True]]


def test_aborted_and_empty_responses_are_invalid_not_zero():
    batch = to_columns([_completion((4, 5), "abort"), _completion(()), _completion((1,))])
    assert batch["valid"].tolist() == [False, False, True]


def test_a_block_without_rows_keeps_its_columns():
    batch = to_columns([])
    assert len(batch) == 0 and batch["response_ids"].shape == (0, 1)


def test_request_seeds_depend_on_every_part_of_the_key():
    seeds = {derive_seed(1, "train", *key) for key in itertools.product(range(4), repeat=3)}
    assert len(seeds) == 64 and derive_seed(1, "a") != derive_seed(2, "a")
    assert all(0 <= seed < 1 << 31 for seed in seeds)
