"""``assign_credit``: the columns that learning needs, from the columns that generation and scoring left.

    score -> [valid] -> [correction: mask, weights] -> shaped -> on the last trainable token
          -> [+ step rewards] -> [- KL] -> advantages

A pure function over all rows of a step; statistics over groups and over the batch are taken here, once. The raw
``score`` is never changed: filters and metrics go on reading it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import estimate, needs_of
from hybridflow.algorithms.correction import Correction, correct
from hybridflow.algorithms.covariance import selected_column
from hybridflow.algorithms.kl import base_kind, kl_estimate
from hybridflow.algorithms.masking import Groups, keep, masked_mean, masked_moments
from hybridflow.algorithms.rewards import (
    RewardNormalizer,
    overlong_penalty,
    place_scores,
    reward_components,
    shape_scores,
    subtract_kl,
)
from hybridflow.batch.batch import Batch
from hybridflow.config.actor import PolicyLossConfig
from hybridflow.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from hybridflow.config.reward import OverlongConfig

Metrics = dict[str, float]

_PASSED_BY_NAME = frozenset({"token_rewards", "mask", "group_id", "config"})
_READS = (
    *("score", "group_id", "response_mask", "response_length", "prompt_length?", "finish_reason?"),
    *("rollout_log_probs?", "old_log_probs?", "values?", "token_scores?"),
)


def credit_reads(config: AlgorithmConfig) -> tuple[str, ...] | None:
    """Columns that ``assign_credit`` reads (``name?``: where it is there); None: all, for an estimator that names none.

    ``valid`` is read always.
    """
    needs = needs_of(config.adv_estimator)
    if needs is None:
        return None
    reads = [*_READS, *sorted(needs)]
    if config.use_kl_in_reward:
        reads.append("full_kl" if base_kind(config.kl_penalty) == "full" else "ref_log_probs")
    reads += ["reward_info"] if config.gdpo_reward_keys else []
    return tuple(reads)


def assign_credit(
    batch: Batch,
    config: AlgorithmConfig,
    *,
    kl_coef: float,
    max_response_length: int,
    overlong: OverlongConfig,
    normalizer: RewardNormalizer | None = None,
    policy_loss: PolicyLossConfig | None = None,
) -> tuple[Batch, Metrics]:
    """Only the added columns (loss_mask, token_rewards, advantages, and what the configuration asks for) and metrics.

    Further columns: ``returns`` when there are ``values``, ``correction_weights`` with ``rollout_is``,
    ``old_log_probs`` in bypass mode, ``covariance_selected`` for the policy losses that need it. Rows that are not
    valid, whose score is not finite, or that are rejected as a whole are in no statistic and no loss.

    ``kl_coef`` belongs to the KL in the reward and is read only with ``use_kl_in_reward``; ``normalizer`` holds running
    reward statistics, is needed with ``reward_shaping.normalize`` and is updated here; ``policy_loss`` is needed for
    clip_cov and kl_cov.

    Raises:
        ColumnError: a column that the configuration needs is missing.
        EngineError: the mismatch guard stops the run.
    """
    score = batch["score"].double()
    usable = batch["valid"] & score.isfinite()
    metrics = _length_metrics(batch, usable, max_response_length) | _score_metrics(batch, score, usable, config)

    added = _bypassed(batch, config.rollout_correction)
    batch = batch.with_columns(**added)
    correction = _corrected(batch, batch["response_mask"] & usable[:, None], config.rollout_correction)
    mask, metrics = correction.mask, metrics | correction.metrics
    added["loss_mask"] = mask
    if correction.weights is not None:
        added["correction_weights"] = correction.weights

    shaped, baseline, shaping_metrics = _shaped(batch, score, mask, max_response_length, config, overlong, normalizer)
    token_rewards = place_scores(scores=shaped.float(), mask=mask)
    if "token_scores" in batch:
        token_rewards = token_rewards + keep(batch["token_scores"], mask)
    if config.use_kl_in_reward:
        token_rewards, kl_metrics = _with_kl(batch, token_rewards, mask, config.kl_penalty, kl_coef)
        metrics |= kl_metrics
    added["token_rewards"] = token_rewards

    known = batch.with_columns(**added).columns()
    others = {name: value for name, value in known.items() if name not in _PASSED_BY_NAME} | baseline
    advantages, returns = estimate(
        config.adv_estimator,
        token_rewards=token_rewards,
        mask=mask,
        group_id=batch["group_id"],
        config=config,
        columns=others,
    )
    added["advantages"] = advantages
    if "values" in batch:
        added["returns"] = returns
    added |= selected_column(batch, advantages, mask, policy_loss)
    metrics |= shaping_metrics | _credit_metrics(batch, token_rewards, advantages, returns, mask)
    return Batch(added), metrics


def _bypassed(batch: Batch, config: RolloutCorrectionConfig) -> dict[str, Tensor]:
    """The sampler's log-probs as old ones, in bypass mode (those of the trainer, where there are any, are replaced)."""
    return {"old_log_probs": batch["rollout_log_probs"]} if config.bypass_mode else {}


def _corrected(batch: Batch, mask: Tensor, config: RolloutCorrectionConfig) -> Correction:
    """Mask and weights; metrics whenever both log-probs are there, corrections only where configured."""
    asked = any(
        option is not None
        for option in (
            config.rollout_is,
            config.rollout_rs,
            config.rollout_token_veto_threshold,
            config.guard_max_log_ratio,
        )
    )
    known = "old_log_probs" in batch and "rollout_log_probs" in batch
    if config.bypass_mode or not (asked or known):
        return Correction(mask=mask, weights=None)
    return correct(
        old_log_probs=batch["old_log_probs"], rollout_log_probs=batch["rollout_log_probs"], mask=mask, config=config
    )


def _shaped(
    batch: Batch,
    score: Tensor,
    mask: Tensor,
    max_response_length: int,
    config: AlgorithmConfig,
    overlong: OverlongConfig,
    normalizer: RewardNormalizer | None,
) -> tuple[Tensor, dict[str, Tensor], Metrics]:
    """Shaped scores; the greedy responses' scores (where there are any) shaped alike, or they would be no baseline."""
    present, length = mask.any(dim=1), batch["response_length"]
    score = keep(score, present)
    if config.reward_shaping.normalize and normalizer is not None:
        normalizer.update(score, present)
    shape = partial(
        shape_scores,
        max_response_length=max_response_length,
        shaping=config.reward_shaping,
        overlong=overlong,
        normalizer=normalizer,
    )
    shaped, baseline = shape(score=score, response_length=length), {}
    if "baseline_score" in batch:
        greedy = shape(score=batch["baseline_score"], response_length=batch["baseline_length"])
        baseline = {"baseline_score": greedy}
    metrics: Metrics = {}
    if overlong.enable and overlong.log:
        penalty = overlong_penalty(response_length=length, max_response_length=max_response_length, config=overlong)
        metrics = _summary("reward/overlong_penalty", penalty, present)
        metrics["reward/overlong_share"] = float(masked_mean((penalty < 0).double(), present))
    if normalizer is not None and config.reward_shaping.normalize:
        metrics |= {"reward/running_mean": normalizer.mean, "reward/running_std": normalizer.std}
    return shaped, baseline, metrics


def _with_kl(batch: Batch, token_rewards: Tensor, mask: Tensor, kind: str, kl_coef: float) -> tuple[Tensor, Metrics]:
    if base_kind(kind) == "full":
        kl = keep(batch["full_kl"], mask)
    else:
        kl = kl_estimate(
            kind=kind,
            log_probs=keep(batch["old_log_probs"], mask),
            ref_log_probs=keep(batch["ref_log_probs"], mask),
        )
    metrics, rows = {"actor/reward_kl_penalty_coeff": kl_coef}, mask.any(dim=1)
    if bool(rows.any()):  # a batch without a usable row says nothing about the KL
        metrics["actor/reward_kl_penalty"] = float(masked_mean(masked_mean(kl, mask, dim=1), rows))
    return subtract_kl(token_rewards=token_rewards, kl=kl, mask=mask, kl_coef=kl_coef), metrics


def _length_metrics(batch: Batch, usable: Tensor, max_response_length: int) -> Metrics:
    length = batch["response_length"]
    metrics = _summary("response_length", length, usable)
    metrics["response_length/clip_ratio"] = float(masked_mean((length >= max_response_length).double(), usable))
    if "prompt_length" in batch:
        metrics |= _summary("prompt_length", batch["prompt_length"], usable)
    if "finish_reason" in batch:
        reasons = batch.objects("finish_reason")
        metrics["response/aborted_ratio"] = sum(reason == "abort" for reason in reasons) / max(len(reasons), 1)
    return metrics


def _score_metrics(batch: Batch, score: Tensor, usable: Tensor, config: AlgorithmConfig) -> Metrics:
    groups = Groups.of(batch["group_id"], usable)
    alive = groups.size > 0
    flat = alive & ~groups.has_spread(keep(score, usable))
    metrics = _summary("critic/score", score, usable) | {
        "groups/zero_spread_share": float(masked_mean(flat.double(), alive)),
        "groups/singleton_share": float(masked_mean((groups.size == 1).double(), alive)),
        "groups/empty": float((~alive).sum()),
        "groups/invalid": float((~usable).sum()),
    }
    if config.gdpo_reward_keys:
        parts = reward_components(reward_info=batch.objects("reward_info"), keys=config.gdpo_reward_keys, scored=usable)
        for column, key in enumerate(config.gdpo_reward_keys):
            there = usable & parts[:, column].isfinite().to(usable.device)
            metrics |= _summary(f"reward/{key}", parts[:, column].to(usable.device), there)
    return metrics


def _credit_metrics(batch: Batch, token_rewards: Tensor, advantages: Tensor, returns: Tensor, mask: Tensor) -> Metrics:
    metrics = _summary("critic/rewards", token_rewards.sum(dim=1, dtype=torch.float64), mask.any(dim=1))
    metrics |= _summary("critic/advantages", advantages, mask) | _summary("critic/returns", returns, mask)
    metrics["batch/trained_tokens"] = float(mask.sum())
    if "values" in batch:
        values = keep(batch["values"], mask)
        metrics |= _summary("critic/values", values, mask)
        _, total = masked_moments(returns, mask)
        _, left = masked_moments(returns - values, mask)
        metrics["critic/vf_explained_var"] = float(1 - left / (total + 1e-5))
    return metrics


def _summary(name: str, values: Tensor, mask: Tensor) -> Metrics:
    """Mean, max and min over masked positions; nothing when there are none."""
    picked = values[mask].double()
    if not picked.numel():
        return {}
    low, high = picked.aminmax()
    return {f"{name}/mean": float(picked.mean()), f"{name}/max": float(high), f"{name}/min": float(low)}
