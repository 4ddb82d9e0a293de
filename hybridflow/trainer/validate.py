"""Validation: every held-out prompt exactly once, sampled with ``rollout.val_kwargs`` and, beside it, greedily."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import gather
from hybridflow.config.actor import ValSamplingConfig
from hybridflow.roles.protocols import Roles, SamplingMode
from hybridflow.trainer.metrics import reward_parts


@dataclass(frozen=True, slots=True)
class Validation:
    """Metrics of one validation and a few of its samples."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


def validate(roles: Roles, prompts: Iterable[Batch], sampling: ValSamplingConfig, *, step: int) -> Validation:
    """Scores of all ``prompts``: ``val-core/<source>/reward/mean@n`` (sampled) and ``val-core/<source>/greedy``.

    Means are over rows (failed samples are left out and counted in ``val-aux/failed``); pass@k is the unbiased estimate
    of Chen et al. (arXiv:2107.03374) over samples with score >= 1. Leaves no state: seeds depend on dataset rows only.
    """
    metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    batches = list(prompts)
    passes: list[tuple[SamplingMode, int]] = [("validate", sampling.n)] if sampling.do_sample else []
    if sampling.greedy_too or not sampling.do_sample:
        passes.append(("greedy", 1))
    for mode, n in passes:
        scored = [_score(roles, batch, mode, n, step) for batch in batches]
        metrics.update(_metrics(scored, mode, n))
        samples += [row for batch in scored for row in _samples(batch, mode)]
    return Validation(metrics, samples)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one of ``k`` of ``n`` samples is right, ``correct`` being so: 1 - C(n-c,k) / C(n,k)."""
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _score(roles: Roles, prompts: Batch, mode: SamplingMode, n: int, step: int) -> Batch:
    rows = prompts.repeat(n)
    rows = rows.with_columns(sample_index=torch.arange(len(rows)) % n)
    rows = rows.merge(gather(roles.rollout.generate_sequences(rows, step=step, mode=mode)))
    return rows.with_columns(**gather(roles.reward.compute_reward(rows)).columns())


def _metrics(scored: list[Batch], mode: SamplingMode, n: int) -> dict[str, float]:
    scores: defaultdict[str, list[float]] = defaultdict(list)
    right: defaultdict[str, defaultdict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    said: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    failed, lengths = 0, []
    for batch in scored:
        columns = zip(
            batch.objects("data_source"),
            batch["row_id"].tolist(),
            batch["score"].tolist(),
            batch["valid"].tolist(),
            batch["response_length"].tolist(),
            batch.objects("reward_info"),
            strict=True,
        )
        for source, row, score, valid, length, info in columns:
            lengths.append(length)
            if not valid:
                failed += 1
                continue
            scores[source].append(score)
            said[source].append(info)
            right[source][row].append(score >= 1.0)
    label = "greedy" if mode == "greedy" else "reward"
    metrics = {f"val-core/{source}/{label}/mean@{n}": sum(values) / len(values) for source, values in scores.items()}
    for source, rows in said.items():
        metrics |= {f"val-aux/{source}/{label}/{name}/mean@{n}": mean for name, mean in reward_parts(rows).items()}
    metrics[f"val-aux/{label}/failed"] = float(failed)
    metrics[f"val-aux/{label}/response_length/mean"] = sum(lengths) / max(1, len(lengths))
    for source, by_row in right.items():
        for k in _powers_of_two(n):
            known = [pass_at_k(len(row), sum(row), k) for row in by_row.values() if len(row) >= k]
            if known and n > 1:
                metrics[f"val-core/{source}/{label}/pass@{k}"] = sum(known) / len(known)
    return metrics


def _powers_of_two(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def _samples(batch: Batch, mode: SamplingMode) -> list[dict[str, Any]]:
    columns = zip(
        batch["row_id"].tolist(),
        batch.objects("raw_prompt"),
        batch.objects("response_text") if "response_text" in batch else [""] * len(batch),
        batch.objects("ground_truth"),
        batch["score"].tolist(),
        strict=True,
    )
    names = ("row_id", "prompt", "response", "ground_truth", "score")
    return [{"mode": mode, **dict(zip(names, values, strict=True))} for values in columns]
