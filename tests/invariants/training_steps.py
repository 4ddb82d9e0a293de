"""What the training laws share: rows, two losses, a step of the engine on every rank, and the plain reference.

The reference is as plain as can be: one process, one row at a time, padding-free by construction, float32 PyTorch and
transformers' own attention; no code of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.algorithms.contract import Counts, Metric, Outputs
from hybridflow.batch.batch import Batch
from hybridflow.config.model import FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.topology.parallel import ParallelDims

VOCABULARY = 54


@dataclass(frozen=True)
class ActorLoss:
    """Clipped policy loss with an entropy bonus, token mean."""

    needs: frozenset[str] = frozenset({"log_probs", "entropy"})

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, dict[str, Metric]]:
        assert outputs.log_probs is not None and outputs.entropy is not None
        mask = rows["loss_mask"]
        ratio = torch.exp(outputs.log_probs - rows["old_log_probs"])
        gain = torch.minimum(ratio * rows["advantages"], ratio.clamp(0.8, 1.2) * rows["advantages"])
        per_token = -(gain + 0.01 * outputs.entropy)
        loss = torch.where(mask, per_token, 0.0).sum() / counts.tokens
        top = Metric(torch.where(mask, ratio, 0.0).max().detach(), how="max")
        entropy = Metric(torch.where(mask, outputs.entropy, 0.0).sum().detach(), weight=mask.sum())
        return loss, {"ratio_max": top, "entropy": entropy}


@dataclass(frozen=True)
class CriticLoss:
    """Half the squared error to the returns, token mean."""

    needs: frozenset[str] = frozenset({"values"})

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, dict[str, Metric]]:
        assert outputs.values is not None
        error = 0.5 * (outputs.values - rows["returns"]) ** 2
        loss = torch.where(rows["loss_mask"], error, 0.0).sum() / counts.tokens
        return loss, {"error_max": Metric(error.max().detach(), how="max")}


LOSSES: dict[str, Any] = {"lm": ActorLoss(), "value": CriticLoss()}


@dataclass(frozen=True)
class Case:
    """One way to run a step."""

    folder: str
    head: str = "lm"
    dims: ParallelDims = field(default_factory=ParallelDims)
    micro: MicroBatching = field(default_factory=lambda: MicroBatching(max_tokens=40))
    model: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    param_dtype: str = "fp32"
    optim: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.7
    steps: int = 1
    rows: int = 8
    prompt_of: tuple[int, ...] = ()
    """For every row the row whose prompt it has; empty: every row has its own."""


def make_rows(count: int, *, seed: int = 1, width: int = 9, prompt: int = 7) -> Batch:
    """``count`` rows of uneven lengths; one without a response, one whose tokens are all masked out."""
    g = torch.Generator().manual_seed(seed)
    prompt_length = torch.randint(1, prompt + 1, (count,), generator=g)
    response_length = torch.randint(1, width + 1, (count,), generator=g)
    if count > 3:
        response_length[3] = 0
    at = torch.arange(width)[None]
    inside = at < response_length[:, None]
    loss_mask = inside & (torch.rand(count, width, generator=g) > 0.2)
    if count > 2:
        loss_mask[2] = False
    return Batch(
        {
            "prompt_ids": torch.randint(4, VOCABULARY, (count, prompt), generator=g),
            "prompt_length": prompt_length,
            "response_ids": torch.randint(4, VOCABULARY, (count, width), generator=g),
            "response_length": response_length,
            "loss_mask": loss_mask,
            "old_log_probs": torch.rand(count, width, generator=g) * -6,
            "advantages": 0.3 * torch.randn(count, width, generator=g),
            "returns": 0.3 * torch.randn(count, width, generator=g),
        }
    )


def rows_of(case: Case) -> Batch:
    """All rows of ``case``."""
    rows = make_rows(case.rows)
    if not case.prompt_of:
        return rows
    of = list(case.prompt_of)
    # A prompt of one token is never shared (models/packing.py).
    return rows.with_columns(prompt_ids=rows["prompt_ids"][of], prompt_length=rows["prompt_length"].clamp(min=2)[of])


def own_rows(rows: Batch, dims: ParallelDims, rank: int) -> Batch:
    """The rows of ``rank``'s data-parallel coordinate, dealt out unevenly in turn."""
    coordinate = dims.dp_coordinate(rank)
    return rows.rows([i for i in range(len(rows)) if i % dims.dp == coordinate])


def build(case: Case) -> FSDPEngine:
    """The engine of ``case`` on this rank. SGD with rate 1 by default: the weight change is minus the gradient."""
    plain = {"optimizer": "torch.optim.SGD", "lr": 1.0, "weight_decay": 0.0}
    return FSDPEngine(
        model=ModelConfig(path=case.folder, **case.model),
        head=case.head,  # type: ignore[arg-type]
        sharding=FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype=case.param_dtype), **case.sharding),
        dims=case.dims,
        optim=OptimConfig(**{**plain, **case.optim}),
        **{"grad_clip": 0.0, "device": "cpu", **case.engine},
    )


def steps(case: Case) -> dict[str, Any]:
    """Runs ``case`` on this rank; the metrics of every step and this rank's blocks before and after."""
    engine = build(case)
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = own_rows(rows_of(case), case.dims, rank)
    before = blocks(engine)
    counts = engine.counts(rows)
    metrics = []
    for _ in range(case.steps):
        metrics.append(
            engine.update(rows, LOSSES[case.head], temperature=case.temperature, micro=case.micro, counts=counts)
        )
    return {"metrics": metrics, "before": before, "after": blocks(engine), "counts": counts}


def blocks(engine: FSDPEngine) -> dict[str, tuple[Any, tuple[int, ...], Tensor]]:
    """This rank's blocks by name: box, full shape, values."""
    return {shard.name: (shard.box, shard.shape, shard.local.clone()) for shard in engine.shards()}


def assemble(ranks: list[dict[str, tuple[Any, tuple[int, ...], Tensor]]]) -> dict[str, Tensor]:
    """Full parameters from all ranks' blocks; every element must be covered."""
    full: dict[str, Tensor] = {}
    for own in ranks:
        for name, (box, shape, local) in own.items():
            if local.numel() == 0:
                continue
            target = full.setdefault(name, torch.full(shape, float("nan")))
            target[tuple(slice(start, end) for start, end in box)] = local.float()
    for name, value in full.items():
        assert not value.isnan().any(), f"{name}: the ranks' blocks do not cover it"
    return full


def reference_model(folder: str, head: str) -> tuple[torch.nn.Module, torch.nn.Linear | None]:
    """transformers' own model and, for ``value``, a linear head with the stored weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if head == "lm":
        return model, None
    stored = load_file(Path(folder) / "model.safetensors")
    score = torch.nn.Linear(model.config.hidden_size, 1)
    score.load_state_dict({"weight": stored["score.weight"], "bias": stored["score.bias"]})
    return model, score


def add_value_head(folder: str) -> None:
    """Stores a random value head beside the weights of ``folder``: a zero one would hide the body's gradient."""
    path = Path(folder) / "model.safetensors"
    stored = load_file(path)
    width = stored["model.embed_tokens.weight"].shape[1]
    g = torch.Generator().manual_seed(7)
    stored["score.weight"] = torch.randn(1, width, generator=g) * 0.03
    stored["score.bias"] = 0.1 * torch.randn(1, generator=g)
    save_file(stored, path, metadata={"format": "pt"})


def reference_outputs(
    model: torch.nn.Module, score: torch.nn.Linear | None, rows: Batch, temperature: float
) -> dict[str, Tensor]:
    """``[b, T]`` outputs by definition, one row at a time."""
    shape = rows["response_ids"].shape
    names = ("values",) if score is not None else ("log_probs", "entropy")
    columns: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(len(rows)):
        p, r = int(rows["prompt_length"][i]), int(rows["response_length"][i])
        ids = torch.cat([rows["prompt_ids"][i, :p], rows["response_ids"][i, :r]])[None]
        body = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, p - 1 : p + r - 1]
        if score is not None:
            found = {"values": score(body)[:, 0]}
        else:
            log_p = torch.log_softmax(model.get_output_embeddings()(body) / temperature, -1)
            found = {
                "log_probs": log_p[torch.arange(r), ids[0, p:]],
                "entropy": -(log_p.exp() * log_p).sum(-1),
            }
        for name in names:
            columns[name].append(torch.nn.functional.pad(found[name], (0, shape[1] - r)))
    return {name: torch.stack(column) for name, column in columns.items()}


def reference_gradient(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the whole mini-batch in one pass."""
    rows = rows_of(case)
    model, score = reference_model(case.folder, case.head)
    mask = rows["loss_mask"]
    counts = Counts(tokens=int(mask.sum()), sequences=int(mask.any(-1).sum()), rows=len(rows))
    outputs = Outputs(**reference_outputs(model, score, rows, case.temperature))
    loss, _ = LOSSES[case.head](outputs, rows, counts)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if score is not None:
        gradients |= {f"score.{name}": p.grad for name, p in score.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients
