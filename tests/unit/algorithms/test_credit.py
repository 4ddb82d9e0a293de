from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from hybridflow.algorithms.credit import assign_credit
from hybridflow.algorithms.rewards import RewardNormalizer
from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import TABLE
from hybridflow.config.actor import PolicyLossConfig
from hybridflow.config.algorithm import AlgorithmConfig, RewardShapingConfig
from hybridflow.config.choices import ADV_ESTIMATORS, EXACT_KL, KL_TYPES
from hybridflow.config.reward import OverlongConfig
from hybridflow.utils.errors import ColumnError, EngineError
from tests.unit.algorithms.cases import case, correction, lists, padded

SCORES = [1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 1.0, 0.0]


def batch_of(**changes: Any) -> Batch:
    """What generation and scoring leave behind, for the rows of the case."""
    work = case()
    length = (torch.arange(6) * work.mask).amax(dim=1) + 1
    columns: dict[str, Any] = {
        "score": torch.tensor(SCORES, dtype=torch.float64),
        "reward_info": [{"answer": s, "format": 1.0 - s} for s in SCORES],
        "response_mask": work.mask,
        "valid": torch.ones(8, dtype=torch.bool),
        "group_id": work.group_id,
        "response_length": length,
        "prompt_length": torch.arange(8) + 2,
        "finish_reason": ["stop"] * 7 + ["abort"],
        "old_log_probs": work.old_log_probs.float(),
        "old_entropy": work.entropy.float(),
        "old_sum_pi_squared": work.old_log_probs.exp().square().float() + 0.01,
        "ref_log_probs": work.ref_log_probs.float(),
        "rollout_log_probs": work.rollout_log_probs.float(),
        "values": work.values.float(),
        "baseline_score": torch.zeros(8, dtype=torch.float64),
        "baseline_length": torch.ones(8, dtype=torch.int64),
    }
    return Batch({**columns, **changes})


def run(batch: Batch, *, kl_coef: float = 0.1, overlong: OverlongConfig | None = None, **options: Any):
    """(added columns, metrics) under an algorithm configuration."""
    more = {name: options.pop(name) for name in ("normalizer", "policy_loss") if name in options}
    return assign_credit(
        batch,
        AlgorithmConfig(**options),
        kl_coef=kl_coef,
        max_response_length=6,
        overlong=overlong or OverlongConfig(),
        **more,
    )


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_every_estimator_runs_on_the_columns_of_a_step(name: str) -> None:
    added, metrics = run(batch_of(), adv_estimator=name, gdpo_reward_keys=("answer", "format"))
    mask = batch_of()["response_mask"]
    assert set(added.names) == {"loss_mask", "token_rewards", "advantages", "returns"}
    assert torch.equal(added["loss_mask"], mask)
    for column in ("token_rewards", "advantages", "returns"):
        assert added[column].dtype == torch.float32
        assert added[column].isfinite().all()
        assert added[column][~mask].abs().max().item() == 0.0
    assert added["advantages"].abs().max().item() > 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(name in TABLE for name in added.names)


def test_returns_are_added_only_when_there_are_values() -> None:
    added, metrics = run(batch_of().drop("values"))
    assert "returns" not in added
    assert "critic/vf_explained_var" not in metrics
    with pytest.raises(TypeError, match="values"):
        run(batch_of().drop("values"), adv_estimator="gae")


def test_metrics_are_those_of_usable_rows() -> None:
    """F08, J09: extremes over masked positions, means over rows that count; verl's names."""
    valid = torch.tensor([True] * 6 + [False, True])
    added, metrics = run(batch_of(valid=valid))
    scores = torch.tensor(SCORES)[valid]
    assert metrics["critic/score/mean"] == pytest.approx(scores.mean().item())
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (1.0, 0.0)
    assert metrics["groups/invalid"] == 1.0
    assert metrics["response/aborted_ratio"] == 0.125
    length = batch_of()["response_length"][valid].double()
    assert metrics["response_length/mean"] == pytest.approx(length.mean().item())
    assert metrics["response_length/clip_ratio"] == pytest.approx((length == 6).double().mean().item())
    picked = added["advantages"][added["loss_mask"]]
    assert metrics["critic/advantages/max"] == picked.max().item()
    assert metrics["critic/advantages/min"] == picked.min().item()
    assert metrics["batch/trained_tokens"] == added["loss_mask"].sum().item()


def test_extremes_are_taken_where_the_mask_is_true() -> None:
    """J09: advantages [[5, 1], [2, 9]] with mask [[1, 0], [1, 0]]: max 5, min 2."""
    mask = torch.tensor([[1, 0], [1, 0]]).bool()
    batch = Batch(
        {
            "score": torch.tensor([5.0, 2.0], dtype=torch.float64),
            "response_mask": mask,
            "valid": torch.ones(2, dtype=torch.bool),
            "group_id": torch.tensor([0, 1]),
            "response_length": torch.tensor([2, 2]),
            "baseline_score": torch.zeros(2, dtype=torch.float64),
            "baseline_length": torch.ones(2, dtype=torch.int64),
        }
    )
    _, metrics = run(batch, adv_estimator="remax")
    assert (metrics["critic/advantages/max"], metrics["critic/advantages/min"]) == (5.0, 2.0)


def test_failed_and_unjudged_samples_count_nowhere() -> None:
    """B15: valid False, and a nan or infinite score, leave loss_mask, statistics and metrics alike."""
    score = torch.tensor(SCORES, dtype=torch.float64)
    score[0], score[4] = float("nan"), float("inf")
    valid = torch.tensor([True] * 7 + [False])
    added, metrics = run(batch_of(score=score, valid=valid))
    assert not added["loss_mask"][[0, 4, 7]].any()
    assert metrics["groups/invalid"] == 3.0
    assert metrics["groups/empty"] == 1.0  # group 9 was row 4 alone
    assert added["advantages"].isfinite().all()
    two = added["advantages"].amax(dim=1)[[2, 6]]  # the survivors of group 5: scores 0 and 1
    assert two.tolist() == pytest.approx([0.0, 0.7071], abs=1e-3)
    assert added["advantages"].amin(dim=1)[2].item() == pytest.approx(-0.7071, abs=1e-3)


def test_a_lone_survivor_has_advantage_zero_and_stays_finite() -> None:
    """B15 and DESIGN section 8: its group counts survivors."""
    valid = torch.tensor([True, False, False, False, True, False, False, False])
    added, metrics = run(batch_of(valid=valid))
    assert added["advantages"].abs().max().item() == 0.0
    assert metrics["groups/singleton_share"] == 1.0


def test_the_whole_batch_may_fail() -> None:
    """A11."""
    for name in ("grpo", "gae", "reinforce_plus_plus", "gdpo", "optimal_token_baseline"):
        failed = {"valid": torch.zeros(8, dtype=torch.bool), "reward_info": [{}] * 8}
        added, metrics = run(batch_of(**failed), adv_estimator=name, gdpo_reward_keys=("answer",))
        assert not added["loss_mask"].any()
        assert added["advantages"].abs().max().item() == 0.0
        assert all(math.isfinite(value) for value in metrics.values())


def test_a_batch_without_a_usable_row_says_nothing_about_the_kl() -> None:
    """A KL of 0 would steer the adaptive coefficient down."""
    failed = batch_of(valid=torch.zeros(8, dtype=torch.bool))
    assert "actor/reward_kl_penalty" not in run(failed, use_kl_in_reward=True)[1]
    assert "actor/reward_kl_penalty" in run(batch_of(), use_kl_in_reward=True)[1]


def test_the_kl_in_the_reward_reaches_token_rewards_and_its_metric() -> None:
    """B09, C06: per policy token, with the raw KL in the log."""
    batch = batch_of()
    before = batch["old_log_probs"].clone()
    added, metrics = run(batch, use_kl_in_reward=True, kl_coef=0.5)
    plain, _ = run(batch)
    mask = batch["response_mask"]
    kl = torch.where(mask, batch["old_log_probs"] - batch["ref_log_probs"], 0.0)
    torch.testing.assert_close(added["token_rewards"], plain["token_rewards"] - 0.5 * kl)
    per_row = kl.sum(1) / mask.sum(1).clamp(min=1)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(per_row[mask.any(1)].mean().item(), rel=1e-5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert torch.equal(batch["old_log_probs"], before)
    assert metrics["critic/score/mean"] != metrics["critic/rewards/mean"]


SCHULMAN = {
    "k1": lambda x: x,
    "abs": abs,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(-x) - 1 + x,
}
PLAIN_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("kind", [kind for kind in KL_TYPES if kind not in EXACT_KL])
def test_every_sampled_kl_in_the_reward_has_the_value_of_its_formula(kind: str) -> None:
    """J. Schulman 2020, x = old - ref; the reward reads the value alone, so a + changes nothing."""
    work, bare = case(), kind.removesuffix("+")
    added, _ = run(batch_of(), use_kl_in_reward=True, kl_penalty=kind, kl_coef=0.5)
    plain, _ = run(batch_of())
    x = lists(work.old_log_probs - work.ref_log_probs, work.mask)
    kl = padded([[SCHULMAN[PLAIN_NAMES.get(bare, bare)](value) for value in row] for row in x], work.mask)
    cost = (plain["token_rewards"] - added["token_rewards"]).double()
    torch.testing.assert_close(cost, 0.5 * kl, atol=1e-5, rtol=1e-5)  # columns are float32


def test_the_exact_kl_in_the_reward_is_a_column() -> None:
    full = torch.full((8, 6), 0.25)
    added, _ = run(batch_of(full_kl=full), use_kl_in_reward=True, kl_penalty="full", kl_coef=1.0)
    plain, _ = run(batch_of())
    torch.testing.assert_close(added["token_rewards"], plain["token_rewards"] - 0.25 * added["loss_mask"])
    with pytest.raises(ColumnError, match="full_kl"):
        run(batch_of(), use_kl_in_reward=True, kl_penalty="full")


def test_without_a_kl_no_reference_is_read() -> None:
    """C09."""
    for name in ADV_ESTIMATORS:
        run(batch_of().drop("ref_log_probs"), adv_estimator=name, gdpo_reward_keys=("answer",))


def test_missing_columns_are_named() -> None:
    with pytest.raises(ColumnError, match="ref_log_probs"):
        run(batch_of().drop("ref_log_probs"), use_kl_in_reward=True)
    with pytest.raises(ColumnError, match="rollout_log_probs"):
        run(batch_of().drop("rollout_log_probs"), rollout_correction=correction(rollout_is="token"))


def test_rejected_rows_leave_the_statistics_of_their_group() -> None:
    """B12: row 0 is rejected for its mismatch; group 5 then counts its other two survivors."""
    work = case()
    rollout = work.old_log_probs.float().clone()
    rollout[0, 0] -= 5.0
    added, metrics = run(
        batch_of(rollout_log_probs=rollout),
        rollout_correction=correction(rollout_rs="seq_max_k2", rollout_rs_threshold=1.0),
    )
    assert not added["loss_mask"][0].any()
    assert added["loss_mask"][2].any()
    assert added["advantages"][6].max().item() == pytest.approx(0.7071, abs=1e-3)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 7)


def test_a_rejected_last_token_does_not_take_the_score_with_it() -> None:
    """B07 with rejection: the score moves to the last token that is left."""
    work = case()
    rollout = work.old_log_probs.float().clone()
    rollout[0, 5] -= 5.0
    added, _ = run(
        batch_of(rollout_log_probs=rollout), rollout_correction=correction(rollout_rs="token", rollout_rs_threshold=2.0)
    )
    assert added["loss_mask"][0].tolist() == [True] * 5 + [False]
    assert added["token_rewards"][0].tolist() == [0, 0, 0, 0, 1, 0]


def test_correction_weights_are_a_column() -> None:
    added, metrics = run(batch_of(), rollout_correction=correction(rollout_is="token"))
    assert not added["correction_weights"].requires_grad
    assert added["correction_weights"].dtype == torch.float32
    assert 0 < metrics["rollout_corr/rollout_is_mean"] <= 2


def test_mismatch_is_a_metric_even_without_correction() -> None:
    added, metrics = run(batch_of())
    assert "correction_weights" not in added
    assert metrics["rollout_corr/abs_log_ratio"] > 0
    assert "rollout_corr/kl" not in run(batch_of().drop("rollout_log_probs"))[1]


def test_the_guard_stops_the_run() -> None:
    with pytest.raises(EngineError, match="guard_max_log_ratio"):
        run(batch_of(), rollout_correction=correction(guard_max_log_ratio=1e-3, guard_action="stop"))


def test_bypass_hands_the_samplers_log_probs_on() -> None:
    added, metrics = run(batch_of().drop("old_log_probs"), rollout_correction=correction(bypass_mode=True))
    assert torch.equal(added["old_log_probs"], batch_of()["rollout_log_probs"])
    assert "rollout_corr/kl" not in metrics


def test_the_raw_score_is_left_alone_by_shaping() -> None:
    """B18: shaping changes rewards, not the score and its metric."""
    batch = batch_of()
    overlong = OverlongConfig(enable=True, len=4, penalty_factor=1.0, log=True)
    added, metrics = run(batch, overlong=overlong, reward_shaping=RewardShapingConfig(length_penalty=0.1))
    assert batch["score"].tolist() == SCORES
    assert metrics["critic/score/mean"] == pytest.approx(sum(SCORES) / 8)
    assert added["token_rewards"][0, 5].item() == pytest.approx(1.0 - 0.6 - 1.0)
    assert metrics["reward/overlong_penalty/min"] == -1.0
    assert 0 < metrics["reward/overlong_share"] < 1


def test_running_normalisation_lives_over_steps() -> None:
    normalizer = RewardNormalizer(momentum=0.9)
    shaping = RewardShapingConfig(normalize=True)
    _, first = run(batch_of(), reward_shaping=shaping, normalizer=normalizer)
    _, second = run(batch_of(score=torch.ones(8).double()), reward_shaping=shaping, normalizer=normalizer)
    assert second["reward/running_mean"] > first["reward/running_mean"]
    with pytest.raises(ValueError, match="RewardNormalizer"):
        run(batch_of(), reward_shaping=shaping)


def test_the_greedy_baseline_is_shaped_as_the_samples_are() -> None:
    """Or it is none: a sample of the very score and length of the greedy response has advantage 0."""
    work, lengths = case(), batch_of()["response_length"]
    greedy = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.5, 0.0, 1.0, float("nan")], dtype=torch.float64)
    greedy_length = torch.tensor([1, 6, 2, 3, 3, 6, 4, 2])
    shaping = RewardShapingConfig(normalize=True, clip=1.2, length_penalty=0.05)
    added, _ = run(
        batch_of(baseline_score=greedy, baseline_length=greedy_length),
        adv_estimator="remax",
        reward_shaping=shaping,
        overlong=OverlongConfig(enable=True, len=3, penalty_factor=0.5),
        normalizer=RewardNormalizer(momentum=0.9),
    )
    there = [row for row in range(8) if work.mask[row].any()]
    mean = statistics.fmean(SCORES[row] for row in there)
    spread = statistics.pstdev(SCORES[row] for row in there)

    def shaped(score: float, length: int) -> float:
        return min(max((score - mean) / spread, -1.2), 1.2) - 0.05 * length - 0.5 * max(length - 3, 0) / 3

    expected = []
    for row, kept in enumerate(lists(work.mask.double(), work.mask)):
        own, other = shaped(SCORES[row], int(lengths[row])), shaped(float(greedy[row]), int(greedy_length[row]))
        expected.append([0.0 if math.isnan(greedy[row]) else own - other for _ in kept])
    torch.testing.assert_close(added["advantages"].double(), padded(expected, work.mask), atol=1e-6, rtol=1e-6)
    assert not added["advantages"][4].any()


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_covariance_losses_get_their_column(mode: str) -> None:
    policy = PolicyLossConfig(loss_mode=mode, kl_cov_ratio=0.2, clip_cov_ratio=0.2, clip_cov_lb=0.0)
    added, _ = run(batch_of(), policy_loss=policy)
    assert 0 < added["covariance_selected"].sum() < added["loss_mask"].sum()
    assert "covariance_selected" not in run(batch_of(), policy_loss=PolicyLossConfig())[0]


def half_score(*, token_rewards, mask, group_id, config, score, extra_info, **columns):
    """A user's own estimator that reads columns of the step."""
    result = torch.where(mask, 0.5 * score[:, None].float() * len(extra_info), 0.0)
    return result, result


def test_a_users_own_estimator_gets_every_column_by_name() -> None:
    batch = batch_of(extra_info=[{}] * 8)
    added, _ = run(batch, adv_estimator=f"{__name__}:half_score")
    assert added["advantages"][0, 0].item() == 4.0


def test_zero_spread_groups_are_counted_exactly() -> None:
    """B02: seven copies of 0.7 have no spread."""
    score = torch.full((8,), 0.7, dtype=torch.float64)
    _, metrics = run(batch_of(score=score))
    assert metrics["groups/zero_spread_share"] == 1.0


def test_reward_components_are_logged_apart() -> None:
    """H10."""
    _, metrics = run(batch_of(), adv_estimator="gdpo", gdpo_reward_keys=("answer", "format"))
    assert metrics["reward/answer/mean"] == pytest.approx(sum(SCORES) / 8)
    assert metrics["reward/format/mean"] == pytest.approx(1 - sum(SCORES) / 8)
