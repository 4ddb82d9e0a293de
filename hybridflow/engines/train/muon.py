"""Muon for the matrices of the layers, AdamW for the rest: one optimizer to the engine, one learning rate.

Muon moves a matrix along its orthogonalised momentum (arXiv:2502.16982). Embeddings, heads, norms and biases are no
such matrices and are left to AdamW. Steps are scaled to the size of AdamW's (``match_rms_adamw``), so the same rate
serves both.

Arguments, defaults and update are those of ``torch.optim.Muon``; what differs is the orthogonalisation. The iteration
lifts the smallest singular values some five hundred times, and torch runs it in bfloat16 on whatever block it is given:
two layouts of one run then differed by a tenth of an update. Here every rank gathers the whole matrix and iterates in
float32, so that rounding stays rounding, and keeps its own block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridflow.config.model import OptimConfig
from hybridflow.models.load import box_of, local_of, placed_like
from hybridflow.utils.errors import ConfigError

_RATES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
}
"""Factor of the learning rate by ``adjust_lr_fn``."""


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
        self._muon = muon
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
        """One step of both. Collective where parameters are cut: every rank gathers each matrix in turn."""
        assert closure is None, "the engine steps without a closure"
        for group in self._muon.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    muon_step(parameter, self.state[parameter], group)
        for part in self._parts[1:]:
            part.step()


def muon_step(parameter: nn.Parameter, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Moves ``parameter`` by one step of Muon, in place; ``group`` has torch's arguments. Collective if it is cut."""
    assert parameter.grad is not None
    grad, weight = local_of(parameter.grad), local_of(parameter)
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter.grad)
    momentum = local_of(state["momentum_buffer"])
    momentum.lerp_(grad, 1 - group["momentum"])
    direction = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    whole = _whole(direction, parameter)
    moved = orthogonalised(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
    own = tuple(slice(start, end) for start, end in box_of(parameter, parameter.shape))
    rows, columns = parameter.shape
    rate = group["lr"] * _RATES[group["adjust_lr_fn"] or "original"](rows, columns)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(moved[own].to(weight.dtype), alpha=-rate)


def _whole(local: Tensor, parameter: nn.Parameter) -> Tensor:
    """The full float32 matrix of which this rank holds ``local``, placed like ``parameter``."""
    cut = placed_like(local.float(), parameter)
    return cut.full_tensor() if isinstance(cut, DTensor) else cut


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """``U p(S) V^T`` of the float32 ``matrix = U S V^T``: singular values pushed towards 1, directions kept.

    Each step maps a singular value s of the matrix, scaled to Frobenius norm 1, to ``a s + b s^3 + c s^5``.
    """
    a, b, c = coefficients
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    found = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.t()
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found if wide is matrix else found.t()
