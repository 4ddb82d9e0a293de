"""Laws of credit assignment: what stands at masked positions, where rows stand, and names of groups do not matter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridflow.algorithms.credit import assign_credit, credit_reads
from hybridflow.algorithms.rewards import RewardNormalizer
from hybridflow.batch.batch import Batch, concat
from hybridflow.config.algorithm import AlgorithmConfig, RewardShapingConfig
from hybridflow.config.choices import ADV_ESTIMATORS
from hybridflow.config.reward import OverlongConfig
from tests.unit.algorithms.cases import Case, case, correction

SCORES = [1.0, 0.0, 0.25, 1.0, 0.5, 0.75, 1.0, 0.0]
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"adv_estimator": name} for name in ADV_ESTIMATORS},
    "kl in reward": {"adv_estimator": "gae", "use_kl_in_reward": True, "kl_penalty": "low_var_kl", "lam": 0.9},
    "correction": {
        "adv_estimator": "rloo",
        "rollout_correction": correction(rollout_is="sequence", rollout_rs="token", rollout_rs_threshold=1.3),
    },
    "normalised weights": {
        "adv_estimator": "optimal_token_baseline",
        "rollout_correction": correction(
            rollout_is="token", rollout_is_batch_normalize=True, rollout_token_veto_threshold=0.5
        ),
    },
    "bypass": {"adv_estimator": "grpo", "rollout_correction": correction(bypass_mode=True, rollout_rs="token")},
    "shaping": {
        "adv_estimator": "reinforce_plus_plus_baseline",
        "reward_shaping": RewardShapingConfig(normalize=True, clip=1.0, length_penalty=0.05),
    },
}


def batch_of(work: Case, order: torch.Tensor | None = None) -> Batch:
    batch = Batch(
        {
            "score": torch.tensor(SCORES, dtype=torch.float64),
            "reward_info": [{"answer": s, "format": float(i % 3)} for i, s in enumerate(SCORES)],
            "response_mask": work.mask,
            "valid": torch.tensor([True] * 5 + [False] + [True] * 2),
            "group_id": work.group_id,
            "response_length": torch.tensor([6, 5, 1, 1, 3, 3, 4, 5]),
            "old_log_probs": work.old_log_probs,
            "old_entropy": work.entropy,
            "old_sum_pi_squared": work.old_log_probs.exp().square() + 0.01,
            "ref_log_probs": work.ref_log_probs,
            "rollout_log_probs": work.rollout_log_probs,
            "values": work.values,
            "token_scores": work.rewards,
            "baseline_score": torch.linspace(0, 1, 8, dtype=torch.float64),
            "baseline_length": torch.tensor([1, 2, 3, 4, 5, 6, 5, 4]),
        }
    )
    return batch if order is None else batch.rows(order)


def run(batch: Batch, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    config = AlgorithmConfig(gdpo_reward_keys=("answer", "format"), gamma=0.95, **options)
    added, metrics = assign_credit(
        batch,
        config,
        kl_coef=0.1,
        max_response_length=6,
        overlong=OverlongConfig(enable=True, len=2),
        normalizer=RewardNormalizer(momentum=0.9) if config.reward_shaping.normalize else None,
    )
    return added.tensors(), metrics


@pytest.mark.parametrize("name", OPTIONS)
def test_garbage_at_masked_positions_changes_nothing(name: str) -> None:
    """A12, B06, C12: nan, inf and huge numbers in every per-token column beyond the mask."""
    clean, clean_metrics = run(batch_of(case()), OPTIONS[name])
    dirty, dirty_metrics = run(batch_of(case().poisoned()), OPTIONS[name])
    for column, value in clean.items():
        if column != "old_log_probs":  # bypass: the sampler's column as it is
            assert torch.equal(value, dirty[column]), column
    assert clean_metrics == dirty_metrics


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [4, 0, 7, 2, 1, 6, 3, 5]])
@pytest.mark.parametrize("name", OPTIONS)
def test_permuting_rows_permutes_results_and_nothing_else(name: str, order: list[int]) -> None:
    """B10."""
    index = torch.tensor(order)
    plain, metrics = run(batch_of(case()), OPTIONS[name])
    moved, moved_metrics = run(batch_of(case(), index), OPTIONS[name])
    for column, value in plain.items():
        # float32 columns from float64 sums in another order: the last bit may differ
        torch.testing.assert_close(moved[column], value[index], rtol=1e-6, atol=1e-7)
    assert moved_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_group_without_a_usable_row_changes_nothing(name: str) -> None:
    """B15, A11: two failed rows of a prompt of their own, garbage in every number."""
    batch = batch_of(case())
    failed = batch_of(case().poisoned()).rows([5, 3])
    failed = failed.with_columns(group_id=torch.tensor([77, 77]), valid=torch.tensor([False, False]))
    found, metrics = run(concat([batch, failed]), OPTIONS[name])
    plain, plain_metrics = run(batch, OPTIONS[name])
    for column, value in plain.items():
        torch.testing.assert_close(found[column][:8], value, rtol=1e-6, atol=1e-7)
        assert not found[column][8:].any() or column == "old_log_probs", column
    counted = {"groups/empty", "groups/invalid"}
    same = {metric: value for metric, value in plain_metrics.items() if metric not in counted}
    assert {metric: metrics[metric] for metric in same} == pytest.approx(same, rel=1e-9, abs=1e-9)
    assert (metrics["groups/empty"], metrics["groups/invalid"]) == (1.0, plain_metrics["groups/invalid"] + 2)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_without_a_usable_row_has_no_advantage_and_no_nan(name: str) -> None:
    """A11."""
    batch = batch_of(case().poisoned()).with_columns(valid=torch.zeros(8, dtype=torch.bool))
    found, metrics = run(batch, OPTIONS[name])
    assert not found["advantages"].any()
    assert not found["loss_mask"].any()
    assert all(math.isfinite(value) for value in metrics.values()), metrics


@pytest.mark.parametrize("name", OPTIONS)
def test_names_of_groups_do_not_matter(name: str) -> None:
    batch = batch_of(case())
    renamed = batch.with_columns(group_id=1000 - batch["group_id"])
    for column, value in run(batch, OPTIONS[name])[0].items():
        torch.testing.assert_close(run(renamed, OPTIONS[name])[0][column], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIONS)
def test_wider_padding_changes_nothing(name: str) -> None:
    batch = batch_of(case())
    wide = {
        column: torch.cat([value, value.new_zeros(8, 70)], dim=1) if value.ndim == 2 else value
        for column, value in batch.tensors().items()
    }
    plain, metrics = run(batch, OPTIONS[name])
    padded, padded_metrics = run(Batch({**wide, "reward_info": batch.objects("reward_info")}), OPTIONS[name])
    for column, value in plain.items():
        torch.testing.assert_close(padded[column][:, :6], value, rtol=1e-6, atol=1e-7)
        assert padded[column][:, 6:].double().abs().max().item() == 0.0
    assert padded_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_no_input_column_is_written_to(name: str) -> None:
    """C06."""
    batch = batch_of(case())
    before = {column: value.clone() for column, value in batch.tensors().items()}
    run(batch, OPTIONS[name])
    for column, value in before.items():
        assert torch.equal(batch[column], value), column


@pytest.mark.parametrize("name", OPTIONS)
def test_only_the_declared_columns_are_read(name: str) -> None:
    """What does not travel to the rank that assigns credit changes neither a column nor a metric."""
    config = AlgorithmConfig(gdpo_reward_keys=("answer", "format"), gamma=0.95, **OPTIONS[name])
    reads, batch = credit_reads(config), batch_of(case()).with_columns(response_ids=torch.zeros(8, 6).long())
    assert reads is not None
    travels = {name.rstrip("?") for name in reads} | {"valid"}
    assert all(name.endswith("?") or name in batch for name in reads)
    assert "response_ids" not in travels
    assert ("ref_log_probs" in travels) == config.use_kl_in_reward
    assert ("baseline_score" in travels) == (name == "remax")
    plain, metrics = run(batch, OPTIONS[name])
    found, found_metrics = run(batch.select(*(column for column in batch.names if column in travels)), OPTIONS[name])
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[column], value) for column, value in plain.items())
    assert found_metrics == metrics


@pytest.mark.parametrize("name", [name for name in ADV_ESTIMATORS if name != "tir_optimal_token_baseline"])
def test_a_tool_gap_is_the_same_as_a_row_without_it(name: str) -> None:
    """B06, B07, B08: results at trainable tokens are those of the compacted rows.

    tir_optimal_token_baseline is left out by its definition: it aligns samples by turns, and the gaps make the turns.
    """
    batch = batch_of(case())
    mask = batch["response_mask"]
    place = torch.argsort((~mask).long(), dim=1, stable=True)
    compact = {
        column: value.gather(1, place) if value.ndim == 2 else value for column, value in batch.tensors().items()
    }
    gaps, _ = run(batch, OPTIONS[name])
    tight, _ = run(Batch({**compact, "reward_info": batch.objects("reward_info")}), OPTIONS[name])
    for column in ("advantages", "returns", "token_rewards"):
        torch.testing.assert_close(tight[column], gaps[column].gather(1, place), rtol=1e-6, atol=1e-7)
