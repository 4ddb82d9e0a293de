from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch

from hybridflow.algorithms import advantages
from hybridflow.algorithms.advantages import ADVANTAGES, NEEDS, estimate, needs_of, resolve
from hybridflow.config.checks import GROUP_ESTIMATORS
from hybridflow.config.choices import ADV_ESTIMATORS
from hybridflow.config.root import VALUE_ESTIMATORS
from hybridflow.utils.errors import ConfigError
from tests.unit.algorithms.cases import Case, algorithm, case, lists, padded
from tests.unit.algorithms.test_returns import loop_gae

INFO = [{"answer": a, "format": f} for a, f in [(1, 0), (0, 1), (0, 1), (1, 1), (1, 0), (1, 0.5), (0.5, 0), (0, 0)]]


def run(name: str, work: Case, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """An estimator with all columns that any of them reads."""
    baseline = torch.linspace(-1, 1, len(work.mask), dtype=torch.float64)
    changes = {"gdpo_reward_keys": ("answer", "format"), **changes}
    extra = changes.pop("extra", {})
    return ADVANTAGES[name](
        token_rewards=work.rewards,
        mask=work.mask,
        group_id=work.group_id,
        config=algorithm(adv_estimator=name, **changes),
        **{
            "values": work.values,
            "baseline_score": baseline,
            "reward_info": INFO,
            "old_log_probs": work.old_log_probs,
            "old_entropy": work.entropy,
            "old_sum_pi_squared": work.old_log_probs.exp().square() + 0.01,
            **extra,
        },
    )


def outcomes(scores: list[float], groups: list[int], name: str, **changes: Any) -> list[float]:
    """Row advantages of one-token rows."""
    rewards = torch.tensor(scores)[:, None]
    found, _ = ADVANTAGES[name](
        token_rewards=rewards,
        mask=torch.ones_like(rewards, dtype=torch.bool),
        group_id=torch.tensor(groups),
        config=algorithm(**changes),
    )
    return found[:, 0].tolist()


def whiten(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean, std = statistics.fmean(flat), statistics.stdev(flat)
    return [[(x - mean) / std for x in row] for row in rows]


def members(work: Case) -> dict[int, list[int]]:
    """Rows with a trainable token by group."""
    found: dict[int, list[int]] = {}
    for row, group in enumerate(work.group_id.tolist()):
        if work.mask[row].any():
            found.setdefault(group, []).append(row)
    return found


def by_group(work: Case, advantage: Any) -> list[list[float]]:
    """Token rows of ``advantage(scores of the group, position in it, rows)``; singletons 0."""
    rewards = lists(work.rewards, work.mask)
    out = [[0.0] * len(row) for row in rewards]
    for rows in members(work).values():
        scores = [sum(rewards[row]) for row in rows]
        for i, row in enumerate(rows):
            value = advantage(scores, i, rows) if len(rows) > 1 else 0.0
            out[row] = [value] * len(rewards[row])
    return out


def loop_reference(name: str, work: Case) -> list[list[float]]:
    """Each estimator as plain loops over lists, from its paper."""
    rewards, values = lists(work.rewards, work.mask), lists(work.values, work.mask)
    to_go = [[sum(row[t:]) for t in range(len(row))] for row in rewards]
    if name == "gae":
        return whiten([loop_gae(r, v, 1.0, 1.0) for r, v in zip(rewards, values, strict=True)])
    if name == "reinforce_plus_plus":
        return whiten(to_go)
    if name == "remax":
        baseline = torch.linspace(-1, 1, len(rewards), dtype=torch.float64).tolist()
        return [[x - b for x in row] for row, b in zip(to_go, baseline, strict=True)]
    if name == "grpo":
        return by_group(work, lambda s, i, _: (s[i] - statistics.fmean(s)) / (statistics.stdev(s) + 1e-6))
    if name == "rloo":
        return by_group(work, lambda s, i, _: s[i] - (sum(s) - s[i]) / (len(s) - 1))
    if name == "opo":
        length = [len(row) for row in rewards]

        def opo(s: list[float], i: int, rows: list[int]) -> float:
            weight = [length[row] for row in rows]
            return s[i] - sum(w * x for w, x in zip(weight, s, strict=True)) / sum(weight)

        return by_group(work, opo)
    if name == "gpg":
        total = sum(len(rows) for rows in members(work).values())
        dead = sum(len(rows) for rows in members(work).values() if len(rows) == 1)
        return by_group(work, lambda s, i, _: (s[i] - statistics.fmean(s)) * total / (total - dead))
    if name == "grpo_passk":

        def gain(s: list[float], i: int, _: Any) -> float:
            others = [x for j, x in enumerate(s) if j != i]
            return statistics.fmean(max(s[i] - x, 0.0) for x in others) / (statistics.stdev(s) + 1e-6)

        return by_group(work, gain)
    if name == "reinforce_plus_plus_baseline":
        centred = by_group(work, lambda s, i, _: s[i] - statistics.fmean(s))
        compared = [row for rows in members(work).values() if len(rows) > 1 for row in rows]
        flat = [x for row in compared for x in centred[row]]
        mean, std = statistics.fmean(flat), statistics.stdev(flat)
        return [[(x - mean) / std if row in compared else 0.0 for x in centred[row]] for row in range(len(centred))]
    if name == "gdpo":
        total, compared = (
            [0.0] * len(rewards),
            [row for rows in members(work).values() if len(rows) > 1 for row in rows],
        )
        for key in ("answer", "format"):
            for rows in members(work).values():
                s = [INFO[row][key] for row in rows]
                for row in rows if len(rows) > 1 else []:
                    total[row] += (INFO[row][key] - statistics.fmean(s)) / (statistics.stdev(s) + 1e-6)
        mean = statistics.fmean(total[row] for row in compared)
        std = statistics.stdev(total[row] for row in compared)
        return [[(total[r] - mean) / std if r in compared else 0.0] * len(rewards[r]) for r in range(len(rewards))]
    raise AssertionError(name)


LOOPS = [name for name in ADV_ESTIMATORS if "token_baseline" not in name]


def test_the_registry_holds_exactly_the_allowed_names() -> None:
    assert tuple(ADVANTAGES) == ADV_ESTIMATORS
    assert set(NEEDS) == set(ADVANTAGES)
    assert {name for name, columns in NEEDS.items() if "values" in columns} == set(VALUE_ESTIMATORS)


@pytest.mark.parametrize("name", LOOPS)
def test_an_estimator_equals_its_plain_loop_reference(name: str) -> None:
    work = case()
    expected = padded(loop_reference(name, work), work.mask)
    # float64 sums in another order; the epsilon of 1e-8 inside the whitening's root is the rest
    torch.testing.assert_close(run(name, work)[0], expected, atol=2e-8, rtol=1e-7)


def test_the_discount_of_rewards_to_go_counts_policy_tokens() -> None:
    work = case()
    _, returns = run("reinforce_plus_plus", work, gamma=0.5)
    rows = lists(work.rewards, work.mask)
    expected = [[sum(0.5**k * x for k, x in enumerate(row[t:])) for t in range(len(row))] for row in rows]
    torch.testing.assert_close(returns, padded(expected, work.mask), atol=1e-12, rtol=0)


def test_eight_samples_of_which_three_are_right() -> None:
    """B03: leave-one-out .714286 / -.428571, GRPO 1.207612 / -.724567, mean only .625 / -.375."""
    scores, groups = [1.0] * 3 + [0.0] * 5, [0] * 8
    pair = lambda values: (values[0], values[7])  # noqa: E731
    assert pair(outcomes(scores, groups, "rloo")) == pytest.approx((0.714286, -0.428571), abs=1e-6)
    assert pair(outcomes(scores, groups, "grpo")) == pytest.approx((1.207612, -0.724567), abs=1e-6)
    mean_only = outcomes(scores, groups, "grpo", norm_adv_by_std_in_grpo=False)
    assert pair(mean_only) == pytest.approx((0.625, -0.375), abs=1e-6)


def test_each_group_is_scaled_by_its_own_spread() -> None:
    """B13: groups [0, 1] and [0, 10] give +-.7071 in both; unscaled +-.5 and +-5."""
    scores, groups = [0.0, 1.0, 0.0, 10.0], [0, 0, 1, 1]
    assert outcomes(scores, groups, "grpo") == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-4)
    unscaled = outcomes(scores, groups, "grpo", norm_adv_by_std_in_grpo=False)
    assert unscaled == pytest.approx([-0.5, 0.5, -5, 5])


def test_groups_are_found_by_id_wherever_their_rows_stand() -> None:
    """B10: uid order A B A B, rewards 1, 0, 0, 1."""
    assert outcomes([1.0, 0.0, 0.0, 1.0], [4, 1, 4, 1], "grpo") == pytest.approx(
        [0.7071, -0.7071, -0.7071, 0.7071], abs=1e-4
    )


WRONG: dict[str, tuple[Any, str]] = {
    "one number per row": (lambda mask: (mask[:, 0].double(),) * 2, r"\[\(8,\), \(8,\)\]"),
    "no returns": (lambda mask: mask.double(), r"\[\(8, 6\)\]"),
    "a number": (lambda mask: (mask.double(), 0.0), r"\[\(8, 6\), 'float'\]"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_users_estimator_that_returns_something_else_is_told_what_is_expected(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned, words = WRONG[kind]
    work = case()
    monkeypatch.setattr(advantages, "own", lambda *, mask, **columns: returned(mask), raising=False)
    with pytest.raises(ConfigError, match=rf"must return \(advantages, returns\), each of shape \(8, 6\).*{words}"):
        estimate_own(work)


def estimate_own(work: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return estimate(
        "hybridflow.algorithms.advantages:own",
        token_rewards=work.rewards.float(),
        mask=work.mask,
        group_id=work.group_id,
        config=algorithm(),
        columns={},
    )


def test_what_a_users_estimator_leaves_at_masked_positions_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    work = case()
    dirt = torch.where(work.mask, 2.0, float("nan")).double()
    monkeypatch.setattr(advantages, "own", lambda **columns: (dirt, dirt), raising=False)
    for found in estimate_own(work):
        assert torch.equal(found, torch.where(work.mask, 2.0, 0.0))


@pytest.mark.parametrize(
    "name", sorted(GROUP_ESTIMATORS - {"gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"})
)
def test_one_sample_per_prompt_has_advantage_zero_under_every_group_baseline(name: str) -> None:
    """B01: rewards [1, .5] of two prompts with n=1; one rule for all, no nan."""
    assert outcomes([1.0, 0.5], [0, 1], name) == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
def test_a_lone_survivor_has_advantage_zero(name: str) -> None:
    """B01, B15: in the case, group 9 is a singleton and two rows of group 2 and 5 have lost tokens or all of them."""
    found, _ = run(name, case())
    assert found[4].abs().max().item() == 0.0
    assert found[3].abs().max().item() == 0.0


@pytest.mark.parametrize("score", [0.1, 0.35, 0.7, 0.95, 1 / 3])
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_equal_rewards_give_exactly_zero(score: float, name: str) -> None:
    """B02."""
    assert outcomes([score] * 7, [0] * 7, name) == [0.0] * 7


def test_failed_samples_leave_the_statistics_of_their_group() -> None:
    """B15: rewards [1, nan, 0, nan] count as [1, 0]; the failed rows get 0."""
    rewards = torch.tensor([[1.0], [float("nan")], [0.0], [float("nan")]])
    mask = torch.tensor([[True], [False], [True], [False]])
    found, _ = ADVANTAGES["grpo"](
        token_rewards=rewards, mask=mask, group_id=torch.zeros(4, dtype=torch.int64), config=algorithm()
    )
    assert found[:, 0].tolist() == pytest.approx([0.7071, 0, -0.7071, 0], abs=1e-4)


def brute_force_gain(scores: list[float], i: int, k: int) -> float:
    gains = [
        max(scores[i], *(scores[j] for j in rest)) - max(scores[j] for j in rest)
        for rest in itertools.combinations([j for j in range(len(scores)) if j != i], k - 1)
    ]
    return statistics.fmean(gains)


@pytest.mark.parametrize("k", [2, 3, 5, 9])
def test_grpo_passk_equals_the_sum_over_all_subsets(k: int) -> None:
    scores = [0.3, 1.0, 0.3, -0.5, 0.8]
    found = outcomes(scores, [0] * 5, "grpo_passk", passk=k, norm_adv_by_std_in_grpo=False)
    expected = [brute_force_gain(scores, i, min(k, 5)) for i in range(5)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_grpo_passk_with_k_of_the_group_rewards_the_best_by_its_lead() -> None:
    found = outcomes([0.2, 1.0, 0.7], [0] * 3, "grpo_passk", passk=3, norm_adv_by_std_in_grpo=False)
    assert found == pytest.approx([0, 0.3, 0], abs=1e-6)
    assert outcomes([1.0, 1.0, 0.7], [0] * 3, "grpo_passk", passk=3) == [0.0] * 3


def test_gpg_makes_up_for_groups_without_spread() -> None:
    """Four of six rows are in telling groups: factor 6 / 4."""
    found = outcomes([1.0, 0.0, 1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1, 2, 2], "gpg")
    assert found == pytest.approx([0.75, -0.75, 0, 0, 0.75, -0.75])


def test_remax_subtracts_the_greedy_score_and_skips_failed_greedy_passes() -> None:
    work = case()
    baseline = torch.tensor([0.5, float("nan")] * 4, dtype=torch.float64)
    found, returns = run("remax", work, extra={"baseline_score": baseline})
    torch.testing.assert_close(found[0], returns[0] - 0.5)
    assert found[1].abs().max().item() == 0.0


def test_gdpo_weights_its_components_and_leaves_out_rows_that_lack_one() -> None:
    rewards = torch.zeros(4, 1)
    call = dict(
        token_rewards=rewards,
        mask=torch.ones(4, 1, dtype=torch.bool),
        group_id=torch.tensor([0, 0, 0, 0]),
        reward_info=[{"a": 1, "b": 0}, {"a": 0, "b": 0}, {"a": 0, "b": 1}, {"b": 1}],
    )
    only_a = ADVANTAGES["gdpo"](config=algorithm(gdpo_reward_keys=("a", "b"), gdpo_reward_weights=(1.0, 0.0)), **call)[
        0
    ]
    assert only_a[:, 0].tolist() == pytest.approx([1.1547, -0.57735, -0.57735, 0.0], abs=1e-4)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0)])
def test_gdpo_wants_one_weight_per_component(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="gdpo_reward_weights"):
        run("gdpo", case(), gdpo_reward_weights=weights)
    with pytest.raises(ConfigError, match="gdpo_reward_keys"):
        run("gdpo", case(), gdpo_reward_keys=())


def test_an_unknown_estimator_raises_and_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="reinforce_plus_plus_baseline"):
        resolve("grop")


def best_of_batch(*, token_rewards, mask, group_id, config, **columns):
    """A user's own estimator."""
    return token_rewards, token_rewards


best_of_batch.needs = frozenset({"values"})  # type: ignore[attr-defined]


def test_a_users_own_estimator_is_found_by_its_dotted_path() -> None:
    path = f"{__name__}:best_of_batch"
    assert resolve(path) is best_of_batch
    assert needs_of(path) == frozenset({"values"})
    assert needs_of("grpo") == frozenset()
    assert needs_of(f"{__name__}:loop_reference") is None, "a function that names no columns may read any"
    with pytest.raises(ConfigError, match="nowhere"):
        resolve("nowhere.at:all")


def test_whitening_is_over_trainable_tokens_with_unbiased_variance() -> None:
    advantages, _ = run("gae", case(), gamma=0.9, lam=0.7)
    picked = advantages[case().mask]
    assert picked.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert picked.std().item() == pytest.approx(1.0, abs=1e-6)
    assert math.isfinite(picked.sum().item())


def test_scaling_by_group_by_batch_and_not_at_all_are_three_things() -> None:
    """B13: groups [0, 1] and [0, 10]. Group: +-.7071 in both; none: +-.5 and +-5; batch: one divisor for both.

    Our batch scale (reinforce_plus_plus_baseline) is the deviation of the centred rewards that it divides, unbiased
    over tokens: sqrt(50.5 / 3) = 4.10285. (TRL divides by that of the raw rewards, 4.8563.)
    """
    columns = {
        "token_rewards": torch.tensor([[0.0], [1.0], [0.0], [10.0]], dtype=torch.float64),
        "mask": torch.ones(4, 1, dtype=torch.bool),
        "group_id": torch.tensor([0, 0, 1, 1]),
    }

    def scaled(name: str, **options: object) -> list[float]:
        config = algorithm(adv_estimator=name, **options)
        return ADVANTAGES[name](config=config, **columns)[0].flatten().tolist()

    assert scaled("grpo") == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-4)
    assert scaled("grpo", norm_adv_by_std_in_grpo=False) == pytest.approx([-0.5, 0.5, -5, 5])
    batch = (50.5 / 3) ** 0.5
    expected = [-0.5 / batch, 0.5 / batch, -5 / batch, 5 / batch]
    assert scaled("reinforce_plus_plus_baseline") == pytest.approx(expected, abs=1e-6)
