"""Roles as the trainer holds them: thin typed fronts of worker groups.

A handle knows which columns travel and nothing else; how rows are split is the transfer protocol's business, and where
the ranks are is the group's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from hybridflow.batch.balance import TYPICAL_WIDTH, balance, row_cost
from hybridflow.batch.batch import Batch
from hybridflow.batch.futures import Followed, Mapped, Pending
from hybridflow.dispatch.group import WorkerGroup
from hybridflow.roles.profiles import CallProfile, StepCosts
from hybridflow.roles.protocols import Metrics, PublishNow, SamplingMode


class Handle:
    """One role of one worker group.

    Args:
        group: where its ranks are.
        role: its name there.
        balanced_over: data-parallel coordinates over which rows are balanced by cost; 1: rows go out in their order.
        block_rows: rows of a mini-batch, each of which is balanced by itself; None: the whole batch at once.
        together: neighbouring rows that share a prompt and must meet on one coordinate; 1: rows go out one by one.
        hidden: width of the model, which decides how much of a row's cost is attention.
    """

    def __init__(
        self,
        group: WorkerGroup,
        role: str,
        *,
        balanced_over: int = 1,
        block_rows: int | None = None,
        together: int = 1,
        hidden: int = TYPICAL_WIDTH,
    ) -> None:
        self._group = group
        self._role = role
        self._parts = balanced_over
        self._block_rows = block_rows
        self._together = together
        self._hidden = hidden

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        return self._group.call(self._role, method, *args, **kwargs)

    def _forward(self, method: str, batch: Batch) -> Pending[Batch]:
        order = self._order(batch, len(batch))
        if order is None:
            return self._call(method, batch)
        back = torch.argsort(order)
        return Mapped(self._call(method, batch.rows(order)), lambda result: result.rows(back))

    def _update(self, method: str, batch: Batch, step: int) -> Pending[Metrics]:
        rows = numbered(batch)
        order = self._order(batch, self._block_rows or len(batch))
        return self._call(method, rows if order is None else rows.rows(order), total_rows=len(batch), step=step)

    def _order(self, batch: Batch, block_rows: int) -> torch.Tensor | None:
        if self._parts == 1:
            return None
        prompts = batch["prompt_length"]
        lengths = (prompts + batch["response_length"]).tolist()
        if self._together == 1:
            return balanced_order(lengths, parts=self._parts, block_rows=block_rows, hidden=self._hidden)
        how = {"together": self._together, "parts": self._parts, "block_rows": block_rows, "hidden": self._hidden}
        return shared_order(lengths, prompts.tolist(), **how)

    def save_checkpoint(self, folder: str) -> Pending[None]:
        """Writes the role's state into ``folder`` on every rank."""
        return self._call("save_checkpoint", folder)

    def checkpoint_written(self) -> Pending[bool]:
        """Whether no rank has anything left to write."""
        return Mapped(self._call("checkpoint_written"), all)

    def finish_checkpoint(self) -> Pending[None]:
        """Completes a save in the background on every rank."""
        return self._call("finish_checkpoint")

    def load_checkpoint(self, folder: str) -> Pending[None]:
        """Restores it."""
        return self._call("load_checkpoint", folder)


class RolloutHandle(Handle):
    """The generator."""

    def generate_sequences(self, prompts: Batch, *, step: int, mode: SamplingMode = "train") -> Pending[Batch]:
        """See ``roles.protocols.Rollout``."""
        return self._call("generate_sequences", prompts, step=step, mode=mode)


class ActorHandle(Handle):
    """The policy in training."""

    def compute_log_prob(self, batch: Batch) -> Pending[Batch]:
        """See ``roles.protocols.Actor``."""
        return self._forward("compute_log_prob", batch)

    def compute_advantage(self, batch: Batch, *, kl_coef: float = 0.0) -> Pending[tuple[Batch, Metrics]]:
        """See ``roles.protocols.Actor``."""
        return self._call("compute_advantage", batch, kl_coef=kl_coef)

    def compute_cost_advantage(self, batch: Batch, *, multiplier: float) -> Pending[tuple[Batch, Metrics]]:
        """See ``roles.protocols.Actor``."""
        return self._call("compute_cost_advantage", batch, multiplier=multiplier)

    def update_actor(self, batch: Batch, *, step: int) -> Pending[Metrics]:
        """See ``roles.protocols.Actor``."""
        return self._update("update_actor", batch, step)


class CriticHandle(Handle):
    """The value model."""

    def compute_values(self, batch: Batch) -> Pending[Batch]:
        """See ``roles.protocols.Critic``."""
        return self._forward("compute_values", batch)

    def update_critic(self, batch: Batch, *, step: int) -> Pending[Metrics]:
        """See ``roles.protocols.Critic``."""
        return self._update("update_critic", batch, step)


class CostCriticHandle(CriticHandle):
    """A second critic whose target is the cost: the same worker, its columns and metrics under names of their own."""

    def compute_values(self, batch: Batch) -> Pending[Batch]:
        """Adds cost_values."""
        return Mapped(super().compute_values(batch), lambda found: Batch({"cost_values": found.columns()["values"]}))

    def update_critic(self, batch: Batch, *, step: int) -> Pending[Metrics]:
        """All mini-batches and epochs of one step, on cost_values and cost_returns; metrics are ``cost_critic/*``."""
        columns = batch.columns()
        targets = batch.with_columns(values=columns["cost_values"], returns=columns["cost_returns"])
        return Mapped(
            super().update_critic(targets, step=step),
            lambda metrics: {_of_cost(name): value for name, value in metrics.items()},
        )


def _of_cost(name: str) -> str:
    """``critic/x`` as ``cost_critic/x``, and ``perf/y/critic`` as ``perf/y/cost_critic``."""
    above, _, last = name.rpartition("/")
    return f"cost_{name}" if name.startswith("critic/") else f"{above}/cost_{last}"


class ReferenceHandle(Handle):
    """The frozen policy."""

    def compute_ref_log_prob(self, batch: Batch) -> Pending[Batch]:
        """See ``roles.protocols.Reference``."""
        return self._forward("compute_ref_log_prob", batch)


class RewardHandle(Handle):
    """The scorer."""

    def compute_reward(self, batch: Batch) -> Pending[Batch]:
        """See ``roles.protocols.Reward``."""
        return self._call("compute_reward", batch, total_rows=len(batch))


class RewardModelHandle(Handle):
    """The trained reward model."""

    def compute_model_score(self, batch: Batch) -> Pending[Batch]:
        """Adds model_score."""
        return self._forward("compute_model_score", batch)


class ModelRewardHandle:
    """The scorer behind a reward model: one role to the trainer.

    Args:
        model: asked first.
        scorer: gets the model's scores with the batch.
    """

    def __init__(self, model: RewardModelHandle, scorer: RewardHandle) -> None:
        self._model = model
        self._scorer = scorer

    def compute_reward(self, batch: Batch) -> Pending[Batch]:
        """See ``roles.protocols.Reward``."""
        return Followed(
            self._model.compute_model_score(batch),
            lambda found: self._scorer.compute_reward(batch.with_columns(**found.columns())),
        )


class WeightsHandle(Handle):
    """The way from the actor's weights to the generator's."""

    def publish(self, *, version: int, between_steps: bool = False) -> Pending[Metrics]:
        """See ``roles.protocols.Weights``."""
        call = self._call("publish", version=version)
        if between_steps:  # after the call is queued: a rank that stands still in a publish finds its peers there
            for rank in range(self._group.world):
                self._group.post(PublishNow(version=version), rank=rank)
        return Mapped(call, combine_ranks)


class ObserverHandle(Handle):
    """The observers of one pool."""

    def begin_step(self) -> Pending[None]:
        """See ``roles.protocols.Observer``."""
        return self._call("begin_step")

    def step_costs(self) -> Pending[list[StepCosts]]:
        """See ``roles.protocols.Observer``."""
        return self._call("step_costs")

    def start_profile(self, folder: str) -> Pending[None]:
        """See ``roles.protocols.Observer``."""
        return self._call("start_profile", folder)

    def finish_profile(self) -> Pending[list[CallProfile]]:
        """See ``roles.protocols.Observer``."""
        return Mapped(self._call("finish_profile"), lambda ranks: [call for found in ranks for call in found])


def combine_ranks(per_rank: Sequence[Metrics]) -> Metrics:
    """Metrics of a weight transfer over all ranks: bytes and messages add up, seconds and peaks are the worst rank's.

    The ratio to the bound is that of the totals (1 where nothing has to move).
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(chain.from_iterable(per_rank)):
        values = [metrics[name] for metrics in per_rank if name in metrics]
        worst = name.endswith(("seconds", "rounds", "retries")) or "peak" in name
        combined[name] = max(values) if worst else sum(values)
    bound = combined["publish/bound_bytes"]
    combined["publish/ratio_to_bound"] = combined["publish/bytes"] / bound if bound else 1.0
    return combined


def balanced_order(
    lengths: Sequence[int], *, parts: int, block_rows: int, hidden: int = TYPICAL_WIDTH
) -> torch.Tensor | None:
    """An order of rows in which ``parts`` consecutive chunks of equal count cost nearly the same, block by block.

    Every block of ``block_rows`` rows gives each chunk equally many rows of equal cost (batch/balance.py), so each
    mini-batch is balanced by itself. None where counts do not divide: rows then keep their order.
    """
    return _balanced([row_cost(length, hidden=hidden) for length in lengths], 1, parts=parts, block_rows=block_rows)


def shared_order(
    lengths: Sequence[int],
    prompts: Sequence[int],
    *,
    together: int,
    parts: int,
    block_rows: int,
    hidden: int = TYPICAL_WIDTH,
) -> torch.Tensor | None:
    """``balanced_order`` in which every ``together`` neighbouring rows, which share their prompt, stay neighbours.

    None also where the rows, or those of a block, are no whole groups.
    """
    if len(lengths) % together or block_rows % together:
        return None
    costs = shared_costs(lengths, prompts, together=together, hidden=hidden)
    return _balanced(costs, together, parts=parts, block_rows=block_rows)


def shared_costs(
    lengths: Sequence[int], prompts: Sequence[int], *, together: int, hidden: int = TYPICAL_WIDTH
) -> list[int]:
    """Cost of every ``together`` neighbouring rows whose prompt is encoded once.

    ``L (12 d + L)`` of a row is that of its prompt plus that of its response with the pairs between them.
    """
    groups = range(0, len(lengths), together)
    whole = [sum(row_cost(length, hidden=hidden) for length in lengths[start : start + together]) for start in groups]
    return [
        cost - (together - 1) * row_cost(prompts[start], hidden=hidden)
        for cost, start in zip(whole, groups, strict=True)
    ]


def _balanced(costs: Sequence[int], size: int, *, parts: int, block_rows: int) -> torch.Tensor | None:
    """The order of rows in groups of ``size`` neighbours that cost ``costs``."""
    groups, per_block = len(costs), block_rows // size
    if groups % parts or per_block % parts or groups % per_block:
        return None
    chunks: list[list[int]] = [[] for _ in range(parts)]
    for start in range(0, groups, per_block):
        split = balance(costs[start : start + per_block], parts, equal_counts=True)
        for chunk, group in zip(chunks, split, strict=True):
            chunk.extend((start + position) * size + row for position in group for row in range(size))
    return torch.tensor([row for chunk in chunks for row in chunk], dtype=torch.long)


def numbered(batch: Batch) -> Batch:
    """``batch`` with ``row_index`` 0..B-1: which mini-batch a row belongs to must not depend on how rows are split."""
    return batch.with_columns(row_index=torch.arange(len(batch)))
