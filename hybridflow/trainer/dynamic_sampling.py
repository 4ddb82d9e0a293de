"""Dynamic sampling (DAPO, arXiv:2503.14476): groups without spread are dropped and the batch is topped up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridflow.algorithms.filtering import count_groups, first_groups, next_move, raw_metric, telling_rows
from hybridflow.batch.batch import Batch, concat
from hybridflow.config.algorithm import FilterGroupsConfig
from hybridflow.trainer.failures import failures, refuse_too_many
from hybridflow.utils.errors import DataError

Metrics = dict[str, float]


def fill(
    scored_round: Callable[[], Batch], config: FilterGroupsConfig, *, groups: int, max_failed_share: float
) -> tuple[Batch, Metrics]:
    """A batch of exactly ``groups`` telling groups where the data has them, and what it took.

    Args:
        scored_round: generates and scores the next prompts.
        config: metric, bound on rounds, and what follows when they run out: ``train`` keeps fewer groups, ``skip``
            keeps no row.
        groups: prompts of a trainer step.
        max_failed_share: samples of a round that may fail; judged before groups are dropped, since those that failed as
            a whole are dropped first and a broken generator would only ever skip steps.

    Raises:
        DataError: the rounds ran out and ``on_exhausted`` is error.
        RewardError: more samples of a round failed.
    """
    kept: list[Batch] = []
    found = rounds = generated = 0
    move = "again"
    while move == "again":
        batch = scored_round()
        refuse_too_many(batch, failures(batch), max_failed_share)
        rounds += 1
        telling = _telling(batch, config.metric)
        generated += count_groups(group_id=batch["group_id"], keep_rows=torch.ones(len(batch), dtype=torch.bool))
        found += count_groups(group_id=batch["group_id"], keep_rows=telling)
        kept.append(batch.rows(telling))
        move = next_move(found=found, wanted=groups, rounds=rounds, config=config)
    metrics = {
        "filter_groups/rounds": float(rounds),
        "filter_groups/generated": float(generated),
        "filter_groups/telling": float(found),
        "filter_groups/telling_share": found / generated,
        "filter_groups/skipped": float(move == "skip"),
    }
    if move == "error":
        raise DataError(
            f"{rounds} generation rounds gave {found} groups with different {config.metric} of the {groups} that a "
            f"step needs ({generated} groups were generated): the prompts are too easy or too hard for this "
            "policy; raise algorithm.filter_groups.max_num_gen_batches, or set on_exhausted to train or skip"
        )
    joined = concat(kept)
    wanted = 0 if move == "skip" else groups
    everyone = torch.ones(len(joined), dtype=torch.bool)
    return joined.rows(first_groups(group_id=joined["group_id"], keep_rows=everyone, wanted=wanted)), metrics


def _telling(batch: Batch, metric: str) -> torch.Tensor:
    valid, info = batch["valid"], batch.objects("reward_info")
    values = raw_metric(name=metric, score=batch["score"], reward_info=info, valid=valid)
    return telling_rows(metric=values, group_id=batch["group_id"], valid=valid)
