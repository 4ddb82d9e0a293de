"""Per-token estimates of KL(policy || reference), and the coefficient that goes with them.

With ``x = log policy(y) - log reference(y)`` for a token y sampled from the policy (J. Schulman, "Approximating KL
divergence", 2020):

    k1 = x              unbiased value, high variance; as a loss its expected gradient is 0
    abs = |x|           a distance, not an estimate of the KL
    k2 = x^2 / 2        biased value; as a loss its expected gradient is that of the KL
    k3 = e^-x + x - 1   unbiased value, low variance; as a loss its expected gradient is that of KL(reference || policy)
    full                the exact sum over the vocabulary (models/full_kl.py)

A trailing ``+`` keeps the value and takes the gradient of k2 (straight-through), the one sampled form whose gradient is
right. Aliases: kl = k1, mse = k2, low_var_kl = k3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from hybridflow.config.algorithm import KLControlConfig
from hybridflow.utils.errors import ConfigError

EXP_LIMIT = 10.0
"""Beyond this argument ``exp`` goes on as its tangent: finite, and the gradient still points back to the reference."""
MAX_IMPORTANCE = 10.0
"""Upper bound of the importance weight on the gradient of a ``+`` form."""

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _k1(x: Tensor) -> Tensor:
    return x


def _k2(x: Tensor) -> Tensor:
    return 0.5 * x.square()


def _k3(x: Tensor) -> Tensor:
    return _tangent_exp(-x) + x - 1


def _tangent_exp(x: Tensor) -> Tensor:
    return torch.clamp(x, max=EXP_LIMIT).exp() + math.exp(EXP_LIMIT) * torch.relu(x - EXP_LIMIT)


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "abs": torch.abs, "k2": _k2, "k3": _k3}


def base_kind(kind: str) -> str:
    """k1, abs, k2, k3 or full: ``kind`` without ``+`` and aliases.

    Raises:
        ConfigError: an unknown name.
    """
    bare = kind.removesuffix("+")
    bare = _ALIASES.get(bare, bare)
    if bare not in _ESTIMATES and bare != "full":
        allowed = ", ".join([*_ALIASES, *_ESTIMATES, "full"])
        raise ConfigError(f"KL type {kind!r} is unknown: use one of {allowed}, each also with a trailing +")
    return bare


def kl_estimate(
    *,
    kind: str,
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    importance: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """KL(policy || reference) in nats per token, estimated at the sampled token; sources in the module docstring.

    ``kind`` is a name of the module docstring, but not ``full``, which needs both models. ``importance`` is policy now
    / policy that sampled, without gradient: the ``+`` form promises the gradient of the KL of the *current* policy,
    which needs this weight once the sampling policy is an older one.

    Raises:
        ConfigError: an unknown name, or ``full``.
    """
    bare = base_kind(kind)
    if bare == "full":
        raise ConfigError(f"KL type {kind!r} is exact over the vocabulary and cannot be estimated from log-probs alone")
    x = log_probs.to(_at_least_float32(log_probs)) - ref_log_probs.to(_at_least_float32(ref_log_probs))
    value = _ESTIMATES[bare](x)
    if not kind.endswith("+"):
        return value
    return straight_through(value, _k2(x), importance)


def straight_through(
    value: Float[Tensor, "*shape"],
    surrogate: Float[Tensor, "*shape"],
    importance: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """``value`` with the gradient of ``surrogate`` (times ``importance``)."""
    carrier = surrogate - surrogate.detach()
    if importance is not None:
        carrier = carrier * importance.detach().clamp(max=MAX_IMPORTANCE)
    return value.detach() + carrier


def _at_least_float32(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


@runtime_checkable
class KLController(Protocol):
    """The coefficient of the KL in the reward."""

    value: float

    def update(self, *, kl: float, sequences: int) -> None:
        """Takes the KL per token measured on ``sequences`` rows into account."""
        ...

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from a saved state."""
        ...


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, config: KLControlConfig) -> None:
        self.value = config.kl_coef

    def update(self, *, kl: float, sequences: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing is restored: the configured coefficient holds."""


class AdaptiveKLController:
    """A coefficient steered toward ``target_kl`` (Ziegler et al., arXiv:1909.08593, section 2.2)."""

    ERROR_LIMIT = 0.2

    def __init__(self, config: KLControlConfig) -> None:
        self.value = config.kl_coef
        self._target = config.target_kl
        self._horizon = config.horizon

    def update(self, *, kl: float, sequences: int) -> None:
        """Multiplies by ``1 + clip(kl / target - 1, +-0.2) * sequences / horizon``; a non-finite ``kl`` is ignored.

        More sequences than the horizon count as the horizon: five times as many would turn the sign of the coefficient.
        """
        if not math.isfinite(kl):
            return
        error = min(max(kl / self._target - 1, -self.ERROR_LIMIT), self.ERROR_LIMIT)
        self.value *= 1 + error * min(sequences / self._horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from a saved coefficient."""
        self.value = float(state["value"])


KL_CONTROLLERS: dict[str, Callable[[KLControlConfig], KLController]] = {
    "fixed": FixedKLController,
    "adaptive": AdaptiveKLController,
}
KL_KINDS: tuple[str, ...] = tuple(
    name + suffix for suffix in ("", "+") for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
)
