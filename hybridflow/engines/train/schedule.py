"""Learning-rate schedules as closed forms of the number of finished units (trainer steps or optimizer steps).

``factor(k)`` multiplies the peak rate for the unit after ``k`` finished ones. With warm-up W, total T and floor m:

    k < W        k / W                                       (as verl's and transformers' schedules)
    constant     1
    linear       m + (1 - m) (1 - x)
    cosine       m + (1 - m) (1 + cos(pi x)) / 2             x = min(1, (k - W) / (T - W))

W = 0 gives factor 1 on the first unit; after the warm-up the factor is never below m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridflow.config.model import OptimConfig
from hybridflow.utils.errors import ConfigError

DECAYS = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One closed-form schedule."""

    kind: str
    """constant, linear or cosine."""
    warmup: int
    """Units of warm-up."""
    total: int | None
    """Units in all; only ``constant`` can do without."""
    floor: float
    """Smallest factor after the warm-up."""

    def __post_init__(self) -> None:
        if self.kind not in DECAYS:
            raise ConfigError(f"optim.lr_scheduler_type={self.kind!r}: choose one of {', '.join(DECAYS)}")
        if self.total is None and self.kind != "constant":
            raise ConfigError(f"optim.lr_scheduler_type={self.kind!r} needs the total number of steps; it is not known")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"optim.min_lr_ratio={self.floor} is a share of the peak rate: give 0 to 1")
        if self.warmup < 0:
            raise ConfigError(f"a warm-up of {self.warmup} steps: give 0 or more")

    def factor(self, done: int) -> float:
        """Multiplier of the peak rate after ``done`` finished units."""
        if done < self.warmup:
            return done / self.warmup
        if self.total is None or self.kind == "constant":
            return 1.0
        span = self.total - self.warmup
        x = min(1.0, (done - self.warmup) / span) if span > 0 else 1.0
        return self.floor + (1.0 - self.floor) * DECAYS[self.kind](x)


def schedule(optim: OptimConfig, total_steps: int | None) -> Schedule:
    """The schedule that ``optim`` asks for over ``total_steps`` units.

    Raises:
        ConfigError: when the kind is unknown, or the total is needed and None.
    """
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        if optim.lr_warmup_steps_ratio and total_steps is None:
            raise ConfigError("optim.lr_warmup_steps_ratio needs the total number of steps; set optim.lr_warmup_steps")
        warmup = int(optim.lr_warmup_steps_ratio * (total_steps or 0))
    return Schedule(kind=optim.lr_scheduler_type, warmup=warmup, total=total_steps, floor=optim.min_lr_ratio)
