"""Signs that a run goes wrong, read from its metrics, with what people usually change then.

``symptoms`` is a pure function of recent metrics; ``Alarms`` keeps what is recent and speaks once per episode: again
only after the symptom was gone.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

Metrics = Mapping[str, Any]

WINDOW = 10
"""Steps that count as recent."""
PERSISTS = 3
"""A symptom must hold in this many steps in a row: one odd batch is no sign."""
ENTROPY_LEFT = 0.1
"""Share of the first steps' entropy below which exploration has collapsed."""
STEP_KL_NATS = 0.1
"""Nats per token between the policies before and after the updates of one step; usual values are below 0.02."""
REFERENCE_KL_NATS = 1.0
"""Nats per token between policy and reference; usual values are below 0.1."""
TOKEN_MEANS = ("token-mean", "seq-mean-token-mean")
"""Aggregations under which a term of the loss is a mean over tokens."""
REFERENCE_KL = ("actor/reward_kl_penalty", "actor/kl_loss")
"""The KL to the reference in the reward (always per token) and in the loss."""
FLAT_SHARE = 0.9
"""Share of groups whose rewards are all equal."""
CUT_SHARE = 0.5
"""Share of responses that reach the length limit."""
TELLING_SHARE = "filter_groups/telling_share"
"""Share of the generated groups that dynamic sampling could keep."""
WATCHED = (
    "actor/entropy_old",
    "actor/entropy",
    "actor/ppo_kl",
    *REFERENCE_KL,
    "groups/zero_spread_share",
    "groups/singleton_share",
    TELLING_SHARE,
    "critic/score/mean",
    "critic/score/max",
    "critic/score/min",
    "response_length/clip_ratio",
)
"""All that symptoms are read from."""


def symptoms(
    recent: Sequence[Metrics], *, first_entropy: float | None = None, kl_metrics: Sequence[str] = REFERENCE_KL
) -> dict[str, str]:
    """Message by symptom of a run whose last steps had the metrics ``recent`` (oldest first); empty: all is well.

    Args:
        recent: up to ``WINDOW`` steps; fewer than ``PERSISTS`` show nothing.
        first_entropy: entropy of the first steps in nats, which a later one is compared with; None: not known.
        kl_metrics: names of the KL to the reference in nats per token; the first that is there is read.
    """
    if len(recent) < PERSISTS:
        return {}
    found = {
        "entropy": _entropy(recent, first_entropy),
        "step_kl": _step_kl(recent),
        "reference_kl": _reference_kl(recent, kl_metrics),
        "rewards": _rewards(recent),
        "length": _length(recent),
    }
    return {name: message for name, message in found.items() if message is not None}


class Alarms:
    """Warns in the log about symptoms, once per episode; its memory is part of a checkpoint.

    Args:
        kl_loss_per_token: whether ``actor/kl_loss`` is a mean over tokens (the aggregation of the loss decides).
    """

    def __init__(self, *, kl_loss_per_token: bool = True) -> None:
        self._kl_metrics = REFERENCE_KL if kl_loss_per_token else REFERENCE_KL[:1]
        self._recent: deque[Metrics] = deque(maxlen=WINDOW)
        self._first_entropies: list[float] = []
        self._ringing: frozenset[str] = frozenset()

    def look(self, metrics: Metrics) -> list[str]:
        """Messages of the symptoms that begin with this step."""
        self._recent.append({name: float(metrics[name]) for name in WATCHED if name in metrics})
        entropy = entropy_of(metrics)
        if entropy is not None and len(self._first_entropies) < PERSISTS:
            self._first_entropies.append(entropy)
        first = sum(self._first_entropies) / len(self._first_entropies) if self._first_entropies else None
        found = symptoms(list(self._recent), first_entropy=first, kl_metrics=self._kl_metrics)
        new = [message for name, message in found.items() if name not in self._ringing]
        self._ringing = frozenset(found)
        return new

    def state_dict(self) -> dict[str, Any]:
        """What recent steps looked like, the first entropies, and what has been said of this episode."""
        return {
            "recent": [dict(metrics) for metrics in self._recent],
            "first_entropies": list(self._first_entropies),
            "ringing": sorted(self._ringing),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state."""
        self._recent = deque(state["recent"], maxlen=WINDOW)
        self._first_entropies = list(state["first_entropies"])
        self._ringing = frozenset(state["ringing"])

    def say(self, metrics: Metrics) -> None:
        """Logs them."""
        for message in self.look(metrics):
            logger.warning("step %d: %s", int(metrics.get("training/global_step", 0)), message)


def entropy_of(metrics: Metrics) -> float | None:
    """Nats per token, of the policy that generated; None: not measured in this step."""
    values = _last([metrics], "actor/entropy_old", 1) or _last([metrics], "actor/entropy", 1)
    return values[0] if values else None


def _entropy(recent: Sequence[Metrics], first: float | None) -> str | None:
    values = [entropy_of(metrics) for metrics in recent[-PERSISTS:]]
    if first is None or first <= 0 or not all(value is not None and value < ENTROPY_LEFT * first for value in values):
        return None
    scores = _last(recent, "critic/score/mean", len(recent))
    if len(scores) > PERSISTS and _mean(scores[-PERSISTS:]) > _mean(scores[:-PERSISTS]):
        return None  # the policy grows certain because it grows right
    return (
        f"entropy has collapsed to {values[-1]:.3g} nats (from {first:.3g}) and the score no longer rises. Usual "
        "changes: a higher actor.clip_ratio_high (0.28), actor.entropy_coeff around 0.001, a lower learning rate, "
        "policy_loss.loss_mode=clip_cov or kl_cov, a higher rollout.temperature"
    )


def _step_kl(recent: Sequence[Metrics]) -> str | None:
    values = _last(recent, "actor/ppo_kl", PERSISTS)
    if len(values) < PERSISTS or min(abs(value) for value in values) <= STEP_KL_NATS:
        return None
    return (
        f"the policy moves {abs(values[-1]):.3g} nats per token within one step (actor/ppo_kl). Usual changes: a lower "
        "actor.optim.lr, fewer actor.ppo_epochs or larger mini-batches, a smaller actor.clip_ratio or actor.grad_clip"
    )


def _reference_kl(recent: Sequence[Metrics], names: Sequence[str]) -> str | None:
    name = next((name for name in names if name in recent[-1]), None)
    values = _last(recent, name, PERSISTS) if name is not None else []
    if len(values) < PERSISTS or min(values) <= REFERENCE_KL_NATS:
        return None
    return (
        f"the policy is {values[-1]:.3g} nats per token away from the reference ({name}): the reward may be gamed. "
        "Usual changes: a larger algorithm.kl_ctrl.kl_coef (or type=adaptive) or actor.kl_loss_coef, a lower "
        "learning rate, a look at the best-scored samples (trainer.rollout_data_dir)"
    )


def _rewards(recent: Sequence[Metrics]) -> str | None:
    if not all(_no_spread(metrics) for metrics in recent[-PERSISTS:]):
        return None
    scores = _last(recent, "critic/score/mean", 1)
    level = f" (mean {scores[0]:.3g})" if scores else ""
    filtered = TELLING_SHARE in recent[-1]
    found = (
        f"dynamic sampling keeps only {recent[-1][TELLING_SHARE]:.0%} of the groups that it generates: in nearly all "
        "others every response has the same reward"
        if filtered
        else f"nearly all responses to one prompt have the same reward{level}: there is little to learn from"
    )
    more = "" if filtered else "algorithm.filter_groups.enable=True, "
    return (
        f"{found}. Usual changes: easier prompts if the score is low and harder ones if it is high, {more}"
        "a larger rollout.n, a higher rollout.temperature, a finer reward; a score that never moves often means that "
        "the reward function does not find the answer"
    )


def _no_spread(metrics: Metrics) -> bool:
    if TELLING_SHARE in metrics:  # what dynamic sampling keeps has spread; how much it had to throw away tells
        return 1 - metrics[TELLING_SHARE] >= FLAT_SHARE
    if metrics.get("groups/singleton_share", 0.0) < 1:
        return metrics.get("groups/zero_spread_share", 0.0) >= FLAT_SHARE
    high, low = metrics.get("critic/score/max"), metrics.get("critic/score/min")
    return high is not None and high == low  # one sample per prompt: the whole batch is the group


def _length(recent: Sequence[Metrics]) -> str | None:
    values = _last(recent, "response_length/clip_ratio", PERSISTS)
    if len(values) < PERSISTS or min(values) < CUT_SHARE:
        return None
    return (
        f"{values[-1]:.0%} of the responses reach the length limit: what is cut off scores nothing. Usual changes: a "
        "larger data.max_response_length, reward.overlong.enable=True with a buffer, "
        "algorithm.reward_shaping.length_penalty, a check that the prompt's template and the end tokens fit the model"
    )


def _last(recent: Sequence[Metrics], name: str, count: int) -> list[float]:
    """The metric's finite values in the last ``count`` steps."""
    values = [metrics[name] for metrics in recent[-count:] if name in metrics]
    return [float(value) for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
