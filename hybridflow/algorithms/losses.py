"""The losses that training engines call: policy and critic, as shares of a mini-batch (``contract.py``).

A loss object is made once from the configuration, is pickled to the workers, and holds no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import AGGREGATIONS
from hybridflow.algorithms.contract import Counts, Metric, Outputs
from hybridflow.algorithms.correction import accepted, importance_weights, rejections
from hybridflow.algorithms.kl import base_kind, kl_estimate, straight_through
from hybridflow.algorithms.masking import keep, masked_sum
from hybridflow.algorithms.policy_loss import SEQUENCE_LEVEL, log_ratio, refuse_other_shapes, resolve
from hybridflow.algorithms.value_loss import clipped_value_loss
from hybridflow.batch.batch import Batch
from hybridflow.config.actor import ActorConfig
from hybridflow.config.algorithm import RolloutCorrectionConfig
from hybridflow.config.critic import CriticConfig
from hybridflow.utils.errors import ConfigError, EngineError


class ActorLoss:
    """Policy loss - entropy bonus + KL to the reference.

    Reads the columns loss_mask, advantages, old_log_probs (absent: the first and only update of a batch, where the
    current log-probs are the old ones), ref_log_probs (with ``use_kl_loss``; ``full`` does without), correction_weights
    (when present), and whatever the configured policy loss asks for by name.
    """

    def __init__(
        self,
        config: ActorConfig,
        *,
        max_response_length: int,
        correction: RolloutCorrectionConfig | None = None,
        measure_entropy: bool = False,
    ) -> None:
        """``max_response_length``: divisor of seq-mean-token-sum-norm where ``loss_scale_factor`` is not given.

        ``measure_entropy`` makes entropy a metric even where its coefficient is 0.

        ``correction`` matters in bypass mode alone, where old_log_probs are the sampler's: tokens that its bounds
        reject then count 0 in the policy term (the counts, which must be known before the update, still hold them),
        and with ``loss_type=reinforce`` the loss is ``-A log pi`` with weights current / rollout.

        Raises:
            ConfigError: an unknown loss, aggregation, KL or rejection name, or an option that cannot work in a loss.
        """
        self._bypass = correction if correction is not None and correction.bypass_mode else None
        name = config.policy_loss.loss_mode
        if self._bypass is not None:
            rejections(self._bypass)
            if self._bypass.loss_type == "reinforce":
                name = "reinforce"
            elif self._bypass.loss_type != "ppo_clip":
                raise ConfigError(
                    f"algorithm.rollout_correction.loss_type={self._bypass.loss_type!r}: use ppo_clip or reinforce"
                )
            if self._bypass.rollout_is_batch_normalize:
                raise ConfigError(
                    "algorithm.rollout_correction.rollout_is_batch_normalize cannot work in bypass mode: its weights "
                    "are made inside the loss, one micro-batch at a time"
                )
        resolve(name)
        self._name = name
        if config.loss_agg_mode not in AGGREGATIONS:
            allowed = ", ".join(AGGREGATIONS)
            raise ConfigError(f"loss_agg_mode {config.loss_agg_mode!r} is unknown: use one of {allowed}")
        self._measure_entropy = measure_entropy or config.entropy_coeff != 0
        needs = {"log_probs"} | ({"entropy"} if self._measure_entropy else set())
        if config.use_kl_loss and base_kind(config.kl_loss_type) == "full":
            needs.add("full_kl")
        self._config = config
        self._scale = float(config.loss_scale_factor or max_response_length)
        self._policy_agg = "seq-mean-token-mean" if name in SEQUENCE_LEVEL else config.loss_agg_mode
        self.needs = frozenset(needs)

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, Mapping[str, Metric]]:
        """A micro-batch's share of the loss, and its metrics."""
        config, mask = self._config, rows["loss_mask"]
        log_probs = _given(outputs.log_probs, "log_probs")
        columns = {name: value for name, value in rows.tensors().items() if name not in _PASSED_BY_NAME}
        old = rows["old_log_probs"] if "old_log_probs" in rows else log_probs.detach()
        found = resolve(self._name)(
            log_probs=log_probs, old_log_probs=old, advantages=rows["advantages"], mask=mask, config=config, **columns
        )
        refuse_other_shapes(self._name, found, mask)
        losses, measures = found
        if "correction_weights" in rows:
            losses = keep(losses, mask) * keep(rows["correction_weights"], mask).detach()
        difference, tokens = log_ratio(log_probs.detach(), old, mask), mask.sum()
        metrics: dict[str, Metric] = {}
        if self._bypass is not None:
            losses, metrics = self._bypass_terms(losses, difference, mask)
        loss = self._share(losses, mask, counts, self._policy_agg)
        # One name for the share of the policy term alone, whatever is added to the loss below.
        metrics["actor/pg_loss"] = Metric(loss.detach(), how="sum")
        metrics |= {name: Metric(_sum(value, mask), tokens) for name, value in measures.items()}
        metrics["actor/ppo_kl"] = Metric(_sum(-difference, mask), tokens)
        if "old_log_probs" not in rows and "rollout_log_probs" in rows:
            mismatch = log_ratio(log_probs.detach(), rows["rollout_log_probs"], mask).abs()
            metrics["training/rollout_log_prob_diff/mean"] = Metric(_sum(mismatch, mask), tokens)
            metrics["training/rollout_log_prob_diff/max"] = Metric(mismatch.max(), how="max")
        if self._measure_entropy:
            entropy = self._share(_given(outputs.entropy, "entropy"), mask, counts, config.loss_agg_mode)
            if config.entropy_coeff:
                loss = loss - config.entropy_coeff * entropy
            metrics["actor/entropy"] = Metric(entropy.detach(), how="sum")
        if config.use_kl_loss:
            kl = self._share(self._kl(outputs, rows, difference), mask, counts, config.loss_agg_mode)
            loss = loss + config.kl_loss_coef * kl
            metrics["actor/kl_loss"] = Metric(kl.detach(), how="sum")
        return loss, metrics

    def _bypass_terms(self, losses: Tensor, difference: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """Losses without rejected tokens and, for reinforce, weighted; with both shares as metrics."""
        bypass, tokens = self._bypass, mask.sum()
        assert bypass is not None
        kept = accepted(log_ratio=difference, mask=mask, config=bypass)
        losses = torch.where(kept, losses, 0.0)
        metrics = {"rollout_corr/rollout_rs_masked_fraction": Metric(_sum(~kept, mask), tokens)}
        if self._name == "reinforce" and bypass.rollout_is is not None:
            weights = importance_weights(log_ratio=difference, mask=mask, config=bypass, kept=kept)
            losses = losses * weights
            metrics["rollout_corr/rollout_is_mean"] = Metric(_sum(weights, kept), kept.sum())
        return losses, metrics

    def _kl(self, outputs: Outputs, rows: Batch, difference: Tensor) -> Tensor:
        mask, kind = rows["loss_mask"], self._config.kl_loss_type
        if kind == "full":
            return keep(_given(outputs.full_kl, "full_kl"), mask)
        log_probs = keep(_given(outputs.log_probs, "log_probs"), mask)
        reference, importance = keep(rows["ref_log_probs"], mask), difference.exp()
        if base_kind(kind) != "full":
            return kl_estimate(kind=kind, log_probs=log_probs, ref_log_probs=reference, importance=importance)
        exact = keep(_given(outputs.full_kl, "full_kl"), mask)
        sampled = kl_estimate(kind="k2", log_probs=log_probs, ref_log_probs=reference)
        return straight_through(exact, sampled, importance)

    def _share(self, losses: Tensor, mask: Tensor, counts: Counts, mode: str) -> Tensor:
        return AGGREGATIONS[mode](losses=losses, mask=mask, counts=counts, scale=self._scale)


class CriticLoss:
    """Clipped squared error of the values; reads loss_mask, values (of the old critic) and returns."""

    needs = frozenset({"values"})

    def __init__(self, config: CriticConfig, *, max_response_length: int | None = None) -> None:
        """``max_response_length``: divisor of seq-mean-token-sum-norm, read by no other mode.

        Raises:
            ConfigError: an unknown aggregation, or one that lacks its divisor.
        """
        if config.loss_agg_mode not in AGGREGATIONS:
            allowed = ", ".join(AGGREGATIONS)
            raise ConfigError(f"critic.loss_agg_mode {config.loss_agg_mode!r} is unknown: use one of {allowed}")
        self._config = config
        if config.loss_agg_mode == "seq-mean-token-sum-norm" and max_response_length is None:
            raise ConfigError(
                "critic.loss_agg_mode=seq-mean-token-sum-norm divides by the length limit: none was given"
            )
        self._scale = float(max_response_length or 1)

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, Mapping[str, Metric]]:
        """A micro-batch's share of the loss, and its metrics."""
        mask, values = rows["loss_mask"], _given(outputs.values, "values")
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        losses, clipped = clipped_value_loss(
            values=values,
            old_values=rows["values"],
            returns=rows["returns"],
            mask=mask,
            cliprange=self._config.cliprange_value,
        )
        loss = AGGREGATIONS[self._config.loss_agg_mode](losses=losses, mask=mask, counts=counts, scale=self._scale)
        tokens = mask.sum()
        return loss, {
            "critic/vf_loss": Metric(loss.detach(), how="sum"),
            "critic/vf_clipfrac": Metric(_sum(clipped, mask), tokens),
            "critic/vpred_mean": Metric(_sum(values, mask), tokens),
        }


_PASSED_BY_NAME = frozenset({"log_probs", "old_log_probs", "advantages", "mask", "config"})


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return masked_sum(values.detach().to(torch.promote_types(values.dtype, torch.float32)), mask)


def _given(output: Any, name: str) -> Tensor:
    if output is None:
        raise EngineError(f"the loss needs {name} and the engine's Outputs have none")
    return output
