"""A batch of dynamic sampling from made-up generation rounds (fault B18)."""

from __future__ import annotations

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.config.algorithm import FilterGroupsConfig
from hybridflow.rewards.result import RewardError
from hybridflow.trainer import dynamic_sampling
from hybridflow.utils.errors import ColumnError, DataError

SAMPLES = 3
Group = tuple[float, ...]
FLAT, HALF, MIXED = (0.7,) * SAMPLES, (1.0, 0.0, float("nan")), (1.0, 0.0, 1.0)


class Rounds:
    """Generation rounds with these scores by group; rows of a round in an order of their own, the last one last."""

    def __init__(self, *rounds: list[Group]) -> None:
        self._rounds = rounds
        self.done = 0

    def __call__(self) -> Batch:
        groups = self._rounds[min(self.done, len(self._rounds) - 1)]
        first, self.done = 100 * self.done, self.done + 1
        rows = [(first + g, score) for g, scores in enumerate(groups) for score in scores]
        rows = rows[::2] + rows[1::2]
        score = torch.tensor([score for _, score in rows], dtype=torch.float64)
        return Batch(
            {
                "group_id": torch.tensor([group for group, _ in rows]),
                "score": score,
                "valid": score.isfinite(),
                "finish_reason": ["abort" if s != s else "stop" for _, s in rows],
                "reward_info": [{} if s != s else {"acc": float(s > 0.5)} for _, s in rows],
            }
        )


def fill(
    rounds: Rounds, config: FilterGroupsConfig, *, groups: int, share: float = 1.0
) -> tuple[Batch, dict[str, float]]:
    return dynamic_sampling.fill(rounds, config, groups=groups, max_failed_share=share)


def settings(**changes: object) -> FilterGroupsConfig:
    return FilterGroupsConfig(enable=True, **{"max_num_gen_batches": 4, **changes})


def test_flat_rounds_are_passed_over_and_the_batch_has_its_exact_size_of_whole_groups() -> None:
    """Two rounds in which all scores are equal, one telling group in the third, four in the fourth; wanted: 3."""
    rounds = Rounds([FLAT, FLAT], [FLAT, FLAT], [FLAT, MIXED], [MIXED, HALF, MIXED, MIXED])
    batch, metrics = fill(rounds, settings(), groups=3)
    assert rounds.done == 4
    assert sorted(batch["group_id"].tolist()) == [201] * 3 + [300] * 3 + [301] * 3
    assert batch["valid"].tolist().count(False) == 1, "a failed sample stays beside its group"
    expected = {"rounds": 4, "generated": 10, "telling": 5, "telling_share": 0.5, "skipped": 0}
    assert metrics == {f"filter_groups/{name}": value for name, value in expected.items()}


def test_a_first_round_that_suffices_is_the_only_one() -> None:
    rounds = Rounds([MIXED] * 5)
    batch, metrics = fill(rounds, settings(), groups=2)
    assert (rounds.done, sorted(batch["group_id"].tolist())) == (1, [0] * 3 + [1] * 3)
    assert metrics["filter_groups/rounds"] == 1.0


def test_the_named_metric_is_judged_and_not_the_score() -> None:
    """Scores .6 and .9 differ, as an overlong penalty makes them; both are right, so the group tells nothing."""
    shaped = (0.6, 0.9, 0.8)
    batch, _ = fill(Rounds([shaped, MIXED]), settings(metric="acc", max_num_gen_batches=1), groups=2)
    assert set(batch["group_id"].tolist()) == {1}
    batch, _ = fill(Rounds([shaped, MIXED]), settings(max_num_gen_batches=1), groups=2)
    assert set(batch["group_id"].tolist()) == {0, 1}


@pytest.mark.parametrize(("outcome", "rows", "skipped"), [("train", 3, 0.0), ("skip", 0, 1.0)])
def test_when_the_rounds_run_out_the_chosen_outcome_follows(outcome: str, rows: int, skipped: float) -> None:
    rounds = Rounds([FLAT, MIXED], [FLAT])
    batch, metrics = fill(rounds, settings(on_exhausted=outcome), groups=2)
    assert (rounds.done, len(batch), metrics["filter_groups/skipped"]) == (4, rows, skipped)


@pytest.mark.parametrize("outcome", ["train", "skip"])
def test_data_without_a_telling_group_skips_the_step(outcome: str) -> None:
    batch, metrics = fill(Rounds([FLAT]), settings(on_exhausted=outcome), groups=2)
    assert (len(batch), metrics["filter_groups/skipped"]) == (0, 1.0)


def test_or_stops_the_run_with_what_was_found() -> None:
    with pytest.raises(DataError, match=r"4 generation rounds gave 1 groups .* of the 2 .*5 groups were generated"):
        fill(Rounds([FLAT, MIXED], [FLAT]), settings(on_exhausted="error"), groups=2)


def test_a_round_that_failed_as_a_whole_is_passed_over_whatever_is_judged() -> None:
    """Nobody scored its rows, so they lack the metric: that is no fault of the reward function."""
    failed = (float("nan"),) * SAMPLES
    batch, metrics = fill(Rounds([failed, failed], [MIXED]), settings(metric="acc"), groups=1)
    assert (len(batch), metrics["filter_groups/rounds"]) == (3, 2.0)


def test_a_round_in_which_too_many_samples_failed_stops_the_run_before_its_groups_are_dropped() -> None:
    """Dropped groups are learned from by nobody, so no later stage would ever see a generator that aborts all."""
    failed = (float("nan"),) * SAMPLES
    with pytest.raises(RewardError, match=r"6 of 9 samples .*max_failed_share=0.5: aborted 6"):
        fill(Rounds([failed, failed, MIXED]), settings(), groups=1, share=0.5)
    assert len(fill(Rounds([failed, MIXED]), settings(), groups=1, share=0.5)[0]) == SAMPLES


def test_a_metric_that_no_scored_row_has_is_an_error_that_names_it() -> None:
    with pytest.raises(ColumnError, match="'style'"):
        fill(Rounds([MIXED]), settings(metric="style"), groups=1)
