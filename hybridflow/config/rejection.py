"""What ``rollout_correction.rollout_rs`` and its threshold say, read once for the driver's check and for the rank.

A name is ``level_statistic``; token (token_k1), sequence (seq_sum_k1) and geometric (seq_mean_k1) are shorter ones. A
k1 bound is a ratio on both sides, ``low_high`` or one number h for [1/h, h]; k2 and k3 are bounded from above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridflow.config.choices import REJECTIONS

SHORT_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One bound: what lies outside of [low, high] is rejected (k1: as a ratio; k2, k3: the statistic itself)."""

    level: str
    statistic: str
    low: float
    high: float

    @property
    def whole_rows(self) -> bool:
        """Whether a whole row is rejected at once."""
        return self.level != "token"


class UnreadableRejectionError(ValueError):
    """A bound that cannot be read: ``field`` of the section is at fault, ``text`` says why."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(field, text)
        self.field = field
        self.text = text


def read_rejections(names: str | None, thresholds: str | float | None, default: float) -> tuple[Rejection, ...]:
    """The bounds; several names, separated by commas, have one threshold each or share one.

    ``default``: the bound of k1 statistics without a threshold.

    Raises:
        UnreadableRejectionError: an unknown name, or a threshold that is missing or does not fit.
    """
    if names is None:
        return ()
    listed = [name.strip() for name in names.split(",")]
    given = [text.strip() for text in ("" if thresholds is None else str(thresholds)).split(",")]
    if len(given) not in (1, len(listed)):
        text = f"has {len(given)} entries for the {len(listed)} names of rollout_rs={names}"
        raise UnreadableRejectionError("rollout_rs_threshold", text)
    given = given * len(listed) if len(given) == 1 else given
    return tuple(_read(name, threshold, default) for name, threshold in zip(listed, given, strict=True))


def _read(name: str, threshold: str, default: float) -> Rejection:
    if name not in REJECTIONS:
        raise UnreadableRejectionError("rollout_rs", f"{name} is unknown: use one of {', '.join(REJECTIONS)}")
    level, _, statistic = SHORT_NAMES.get(name, name).rpartition("_")
    low_text, separator, high_text = threshold.partition("_")
    try:
        if separator:
            low, high = float(low_text), float(high_text)
        elif threshold:
            low, high = 0.0, float(threshold)
        else:
            low, high = 0.0, default if statistic == "k1" else math.nan
    except ValueError as error:
        raise _misfit(name) from error
    if statistic == "k1" and not separator and high > 0:
        low = 1 / high
    if not 0 <= low < high or (separator and statistic != "k1"):
        raise _misfit(name)
    return Rejection(level=level, statistic=statistic, low=low, high=high)


def _misfit(name: str) -> UnreadableRejectionError:
    text = (
        f"does not fit rollout_rs={name}: a k1 bound is 'low_high' or one number above 1, a k2 or k3 bound is one "
        "positive number"
    )
    return UnreadableRejectionError("rollout_rs_threshold", text)
