"""Small ragged workpieces for the algorithm tests, float64, with everything that goes wrong in practice in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridflow.config.actor import ActorConfig, PolicyLossConfig
from hybridflow.config.algorithm import AlgorithmConfig, KLControlConfig, RolloutCorrectionConfig


@dataclass(frozen=True)
class Case:
    """Eight rows of three groups, mixed up: a tool gap, a length-1 row, an all-masked row, a singleton group."""

    mask: Tensor
    group_id: Tensor
    rewards: Tensor
    values: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor
    rollout_log_probs: Tensor
    entropy: Tensor
    advantages: Tensor

    def rows(self, index: Tensor) -> Case:
        """The same case with rows in another order."""
        return Case(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})

    def poisoned(self) -> Case:
        """The same case with nan, inf and huge numbers wherever the mask is False."""
        dirt = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30], dtype=torch.float64)
        filler = dirt[torch.arange(self.mask.numel()) % len(dirt)].reshape(self.mask.shape)
        names = [name for name in self.__dataclass_fields__ if name not in ("mask", "group_id")]
        return replace(self, **{name: torch.where(self.mask, getattr(self, name), filler) for name in names})


MASK = [
    [1, 1, 1, 1, 1, 1],
    [1, 1, 0, 0, 1, 0],
    [1, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [0, 1, 1, 0, 0, 0],
    [1, 1, 1, 1, 0, 0],
    [1, 0, 1, 1, 1, 0],
]
GROUP = [5, 2, 5, 2, 9, 2, 5, 2]


def case(seed: int = 0) -> Case:
    """A case; log-ratios are of the order 0.3, so that clips of 0.2 bind on both sides."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(MASK, dtype=torch.bool)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    old = -0.05 - normal().abs()
    return Case(
        mask=mask,
        group_id=torch.tensor(GROUP),
        rewards=normal(),
        values=normal(),
        log_probs=(old + normal(0.3)).clamp(max=-1e-3),
        old_log_probs=old,
        ref_log_probs=old + normal(0.3),
        rollout_log_probs=old + normal(0.2),
        entropy=normal().abs(),
        advantages=normal(),
    )


def lists(values: Tensor, mask: Tensor) -> list[list[float]]:
    """Rows as plain lists with masked positions cut out: what the loop references work on."""
    return [[float(v) for v, m in zip(row, live, strict=True) if m] for row, live in zip(values, mask, strict=True)]


def padded(rows: list[list[float]], mask: Tensor) -> Tensor:
    """The reverse of ``lists``: numbers back at the unmasked positions, 0 elsewhere."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        positions = mask[i].nonzero().squeeze(1).tolist()
        assert len(positions) == len(row)
        for position, value in zip(positions, row, strict=True):
            out[i, position] = value
    return out


def algorithm(**changes: object) -> AlgorithmConfig:
    """An algorithm configuration with undiscounted defaults."""
    return AlgorithmConfig(**changes)


def actor(loss_mode: str = "vanilla", *, policy: dict[str, object] | None = None, **changes: object) -> ActorConfig:
    """An actor configuration with one policy loss."""
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode, **(policy or {})), **changes)


def correction(**changes: object) -> RolloutCorrectionConfig:
    """A rollout correction configuration."""
    return RolloutCorrectionConfig(**changes)


def unchecked(config: object, **changes: object) -> Any:
    """``config`` with values that its own checks would refuse: the functions must name them too."""
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    return config


def controller(**changes: object) -> KLControlConfig:
    """A KL controller configuration."""
    return KLControlConfig(**changes)
