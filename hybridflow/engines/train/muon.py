"""Muon for the matrices of the layers, AdamW for the rest: one optimizer to the engine, one learning rate.

Muon moves a matrix along its orthogonalised momentum (torch.optim.Muon, arXiv:2502.16982). Embeddings, heads, norms and
biases are no such matrices and are left to AdamW. Steps are scaled to the size of AdamW's (``match_rms_adamw``), so the
same rate serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hybridflow.config.model import OptimConfig
from hybridflow.utils.errors import ConfigError


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that share one state and one list of groups.

    Args:
        matrices: parameters for Muon.
        others: parameter groups for AdamW.
        optim: rate, decay, and AdamW's moments; ``override_optimizer_config`` goes to Muon.

    Raises:
        ConfigError: when this torch has no Muon, nothing is left for it, or it does not take an argument.
    """

    def __init__(self, matrices: Mapping[str, nn.Parameter], others: list[dict[str, Any]], optim: OptimConfig) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(f"optim.optimizer=Muon: torch {torch.__version__} has none, 2.9 and later do")
        if not matrices:
            raise ConfigError("optim.optimizer=Muon: the model trains no matrix inside its layers")
        arguments = {"adjust_lr_fn": "match_rms_adamw", **optim.override_optimizer_config}
        try:
            muon = torch.optim.Muon(list(matrices.values()), lr=optim.lr, weight_decay=optim.weight_decay, **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optim.override_optimizer_config does not fit Muon: {error}") from error
        self._parts: list[torch.optim.Optimizer] = [muon]
        if others:
            betas = (optim.betas[0], optim.betas[1])
            self._parts.append(torch.optim.AdamW(others, lr=optim.lr, betas=betas, eps=optim.eps, fused=True))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        # The groups and the state are the parts' own: a rate set here, or a state restored here, is theirs.
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step of both. Collective where parameters are cut: DTensor gathers what whole matrices need."""
        assert closure is None, "the engine steps without a closure"
        for part in self._parts:
            part.step()
