"""``assign_credit``: the columns that learning needs, from the columns that generation and scoring left.

    score -> [valid] -> [correction: mask, weights] -> shaped -> on the last trainable token -> [- KL] -> advantages

A pure function over all rows of a step; statistics over groups and over the batch are taken here, once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import resolve
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.masking import Groups, keep, masked_mean, masked_moments
from hybridflow.algorithms.rewards import RewardNormalizer, overlong_penalty, place_scores, shape_scores, subtract_kl
from hybridflow.batch.batch import Batch
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.reward import OverlongConfig

_PASSED_BY_NAME = frozenset({"token_rewards", "mask", "group_id", "config"})


def assign_credit(
    batch: Batch,
    config: AlgorithmConfig,
    *,
    kl_coef: float,
    max_response_length: int,
    overlong: OverlongConfig,
    normalizer: RewardNormalizer | None = None,
) -> tuple[Batch, dict[str, float]]:
    """Only the added columns (loss_mask, token_rewards, advantages, and what the configuration asks for) and metrics.

    Adds ``returns`` when there are ``values``. Rows that are not valid or whose score is not finite are in no
    statistic, no metric and no loss.

    ``kl_coef`` belongs to the KL in the reward and is read only with ``use_kl_in_reward``; ``normalizer`` holds running
    reward statistics, is needed with ``reward_shaping.normalize`` and is updated here.

    Raises:
        ColumnError: a column that the configuration needs is missing.
    """
    score = batch["score"].double()
    usable = batch["valid"] & score.isfinite()
    mask = batch["response_mask"] & usable[:, None]
    metrics = _length_metrics(batch, usable, max_response_length) | _score_metrics(batch, score, usable)
    columns: dict[str, Tensor] = {}
    present = mask.any(dim=1)

    if config.reward_shaping.normalize and normalizer is not None:
        normalizer.update(score, present)
    shaped = shape_scores(
        score=keep(score, usable),
        response_length=batch["response_length"],
        max_response_length=max_response_length,
        shaping=config.reward_shaping,
        overlong=overlong,
        normalizer=normalizer,
    )
    if overlong.enable and overlong.log:
        penalty = overlong_penalty(
            response_length=batch["response_length"], max_response_length=max_response_length, config=overlong
        )
        metrics["reward/overlong_penalty/mean"] = float(masked_mean(penalty, usable))
    token_rewards = place_scores(scores=shaped.float(), mask=mask)
    if config.use_kl_in_reward:
        kl = kl_estimate(
            kind=config.kl_penalty,
            log_probs=keep(batch["old_log_probs"], mask),
            ref_log_probs=keep(batch["ref_log_probs"], mask),
        )
        token_rewards = subtract_kl(token_rewards=token_rewards, kl=kl, mask=mask, kl_coef=kl_coef)
        metrics["actor/reward_kl_penalty"] = float(masked_mean(masked_mean(kl, mask, dim=1), present))
        metrics["actor/reward_kl_penalty_coeff"] = kl_coef

    others = {name: value for name, value in batch.columns().items() if name not in _PASSED_BY_NAME}
    advantages, returns = resolve(config.adv_estimator)(
        token_rewards=token_rewards, mask=mask, group_id=batch["group_id"], config=config, **others
    )
    columns |= {"loss_mask": mask, "token_rewards": token_rewards, "advantages": advantages}
    metrics |= _summary("critic/rewards", token_rewards.sum(dim=1), present)
    metrics |= _summary("critic/advantages", advantages, mask) | _summary("critic/returns", returns, mask)
    if "values" in batch:
        columns["returns"] = returns
        metrics |= _summary("critic/values", batch["values"], mask)
        metrics["critic/vf_explained_var"] = _explained_variance(batch["values"], returns, mask)
    return Batch(columns), metrics


def _length_metrics(batch: Batch, usable: Tensor, max_response_length: int) -> dict[str, float]:
    length = batch["response_length"]
    metrics = _summary("response_length", length, usable)
    metrics["response_length/clip_ratio"] = float(masked_mean((length >= max_response_length).double(), usable))
    if "prompt_length" in batch:
        metrics |= _summary("prompt_length", batch["prompt_length"], usable)
    if "finish_reason" in batch:
        aborted = torch.tensor([reason == "abort" for reason in batch.objects("finish_reason")])
        metrics["response/aborted_ratio"] = float(aborted.double().mean()) if len(aborted) else 0.0
    return metrics


def _score_metrics(batch: Batch, score: Tensor, usable: Tensor) -> dict[str, float]:
    groups = Groups.of(batch["group_id"], usable)
    alive = groups.size > 0
    flat = alive & ~groups.has_spread(score)
    return _summary("critic/score", score, usable) | {
        "groups/zero_spread_share": float(masked_mean(flat.double(), alive)),
        "groups/empty": float((~alive).sum()),
        "groups/invalid": float((~usable).sum()),
    }


def _summary(name: str, values: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean, max and min over masked positions; nothing when there are none."""
    picked = values[mask].double()
    if not picked.numel():
        return {}
    return {
        f"{name}/mean": float(picked.mean()),
        f"{name}/max": float(picked.max()),
        f"{name}/min": float(picked.min()),
    }


def _explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    _, total = masked_moments(returns, mask)
    _, left = masked_moments(returns - values, mask)
    return float(1 - left / (total + 1e-5))
