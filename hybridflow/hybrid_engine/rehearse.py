"""A reshard carried out on tensors in one process: every rank's plan, parameter by parameter, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridflow.hybrid_engine.boxes import extents, full_box, volume, within
from hybridflow.hybrid_engine.plan import GroupPlan, Slice, plan_rank


def rehearse(slices: Sequence[Slice], full: Callable[[str], Tensor]) -> list[str]:
    """One line for every rank and slice that would not hold the original afterwards; empty when the plan is right.

    Args:
        slices: slices of all parameters over all ranks.
        full: the full parameter by name, as the trainer has it.
    """
    world = len(slices[0].owned)
    groups: list[dict[int, GroupPlan]] = [
        {index: group for group in plan_rank(slices, rank).groups for index in group.slices} for rank in range(world)
    ]
    wrong = []
    for index, piece in enumerate(slices):
        whole = full(piece.name)
        base = full_box(tuple(whole.shape))
        for rank in range(world):
            group = groups[rank][index]
            if not volume(group.needed):
                continue
            assert group.needed is not None
            stored = torch.full(extents(group.needed), float("nan"), dtype=getattr(torch, piece.dtype))
            moves = [(move.peer, move.box) for move in group.receives]
            if group.local is not None:
                moves.append((rank, group.local))
            for peer, box in moves:
                owned = piece.owned[peer]
                assert owned is not None
                block = whole[within(owned, base)]  # all that the peer has: an index outside it would fail
                stored[within(box, group.needed)] = block[within(box, owned)].to(stored.dtype)
            if not torch.equal(stored, whole[within(group.needed, base)].to(stored.dtype)):
                wrong.append(f"{piece.name} {group.needed} on rank {rank}")
    return wrong
