"""Samples of a step that failed: how many by cause, and when they are too many.

A failed sample is invalid: it is in no loss, no statistic, and never counts as a score of 0.
"""

from __future__ import annotations

import re
from collections import Counter

from hybridflow.batch.batch import Batch
from hybridflow.rewards.result import RewardError

EMPTY = "empty"
"""The policy ended at once: invalid, since there is nothing to learn from, but nobody's failure."""
_CAUSES = {
    "no answer": "late",
    "its process ended": "died",
    "the score": "not_finite",
    "no component": "lacks_component",
}
"""Beginning of a scorer's cause to name."""
_RAISED = re.compile(r"raised (\w+)")
SHOWN = 3
"""Causes that are told in words."""


def failures(batch: Batch) -> Counter[str]:
    """Invalid rows by cause: aborted, empty, or the scorer's: a name of ``_CAUSES`` or the class of what was raised."""
    found: Counter[str] = Counter()
    info, reasons = batch.objects("reward_info"), batch.objects("finish_reason")
    for row in (~batch["valid"]).nonzero().squeeze(1).tolist():
        told = info[row].get("failure")
        if told is not None:
            found[_name(str(told))] += 1
        else:
            found["aborted" if reasons[row] == "abort" else EMPTY] += 1
    return found


def failure_metrics(found: Counter[str]) -> dict[str, float]:
    """``failed/<cause>``, only of causes that there are."""
    return {f"failed/{cause}": float(count) for cause, count in sorted(found.items())}


def refuse_too_many(batch: Batch, found: Counter[str], max_share: float) -> None:
    """Nothing, while failures are few; ``max_share``: of all rows.

    Raises:
        RewardError: names the causes, the most frequent first, each with one sample's.
    """
    failed = sum(count for cause, count in found.items() if cause != EMPTY)
    if failed <= max_share * len(batch):
        return
    causes = ", ".join(f"{cause} {count}" for cause, count in found.most_common() if cause != EMPTY)
    told = dict.fromkeys(str(entry["failure"]) for entry in batch.objects("reward_info") if "failure" in entry)
    first = "".join(f"\n  {text}" for text in list(told)[:SHOWN])
    raise RewardError(
        f"{failed} of {len(batch)} samples of the step failed, more than reward.max_failed_share={max_share:g}: "
        f"{causes}{first}"
    )


def _name(cause: str) -> str:
    raised = _RAISED.match(cause)
    if raised is not None:
        return raised[1]
    return next((name for beginning, name in _CAUSES.items() if cause.startswith(beginning)), "other")
