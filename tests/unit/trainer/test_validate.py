"""Best-of-k is unbiased, and every held-out prompt counts exactly once."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import Pending, Ready
from hybridflow.config.actor import ValSamplingConfig
from hybridflow.trainer.validate import Validation, pass_at_k, validate


@pytest.mark.parametrize(("k", "expected"), [(1, 0.25), (2, 0.5), (4, 1.0)])
def test_pass_at_k_of_one_right_answer_in_four(k, expected):
    assert pass_at_k(4, 1, k) == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_pass_at_k_equals_the_share_of_all_subsets_with_a_right_answer(n):
    for right in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([i < right for i in range(n)], k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


class Generator:
    """Responses of as many tokens as the row's number says."""

    def generate_sequences(self, prompts: Batch, **_: Any) -> Pending[Batch]:
        return Ready(Batch({"response_length": prompts["row_id"] + 1, "valid": torch.ones(len(prompts)).bool()}))


class Judge:
    """The score of a row's sample is what its ground truth says; nan: it could not be judged."""

    def compute_reward(self, rows: Batch) -> Pending[Batch]:
        said = zip(rows.objects("ground_truth"), rows["sample_index"].tolist(), strict=True)
        score = torch.tensor([truth[sample] for truth, sample in said], dtype=torch.float64)
        return Ready(Batch({"score": score, "valid": score.isfinite(), "reward_info": [{}] * len(rows)}))


def validated(
    scores: list[tuple[float, ...]], sources: list[str], cuts: tuple[int, ...], **sampling: Any
) -> Validation:
    """Of one prompt for each tuple (the scores of its samples), in batches of ``cuts`` prompts."""
    rows = Batch(
        {
            "row_id": torch.arange(len(scores)),
            "data_source": sources,
            "ground_truth": scores,
            "raw_prompt": [""] * len(scores),
        }
    )
    roles: Any = SimpleNamespace(rollout=Generator(), reward=Judge())
    return validate(roles, rows.split(list(cuts)), ValSamplingConfig(**sampling), step=0)


def test_means_are_over_rows_whatever_the_batches_and_failed_samples_are_left_out() -> None:
    """Faults G12, H11: scores of .5 and 1 have mean .75; a last batch of one row weighs one row."""
    found = validated([(0.5,), (1.0,), (0.0,), (float("nan"),), (1.0,)], ["a", "a", "b", "b", "b"], (2, 2, 1))
    metrics = {name: value for name, value in found.metrics.items() if "greedy" in name}
    assert metrics["val-core/a/greedy/mean@1"] == 0.75
    assert metrics["val-core/b/greedy/mean@1"] == 0.5
    assert metrics["val-aux/greedy/failed"] == 1.0
    assert metrics["val-aux/greedy/response_length/mean"] == 3.0
    assert [sample["row_id"] for sample in found.samples if sample["mode"] == "greedy"] == [0, 1, 2, 3, 4]


def test_best_of_k_is_taken_over_the_samples_of_a_prompt() -> None:
    """Fault J05: one right in four, and a prompt of which one sample failed counts where enough are left."""
    scores = [(0.0, 1.0, 0.0, 0.0), (1.0, float("nan"), 1.0, 1.0)]
    found = validated(scores, ["a", "a"], (1, 1), n=4, do_sample=True).metrics
    assert found["val-core/a/reward/mean@4"] == pytest.approx(4 / 7)
    assert found["val-core/a/reward/pass@1"] == pytest.approx((0.25 + 1) / 2)
    assert found["val-core/a/reward/pass@2"] == pytest.approx((0.5 + 1) / 2)
    assert found["val-core/a/reward/pass@4"] == 1.0
