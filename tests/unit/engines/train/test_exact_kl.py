"""The exact KL inside the engine: both models on the same micro-batches, at every layout, with its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.contract import Counts, Metric, Outputs
from hybridflow.batch.batch import Batch
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError, EngineError
from tests.invariants.training_steps import Case, assemble, blocks, build, make_rows, own_rows, reference_model, rows_of
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

KL = frozenset({"full_kl"})
TEMPERATURE = 0.7
LORA = {"lora_rank": 4, "lora_alpha": 8.0}


@dataclass(frozen=True)
class KLLoss:
    """The exact KL, token mean."""

    needs: frozenset[str] = KL

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, dict[str, Metric]]:
        assert outputs.full_kl is not None
        loss = torch.where(rows["loss_mask"], outputs.full_kl, 0.0).sum() / counts.tokens
        return loss, {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Policy and reference: other weights, untied so that the head is a weight of its own."""
    policy = save_tiny_model(tmp_path_factory.mktemp("policy"), tied=False)
    return str(policy), str(save_tiny_model(tmp_path_factory.mktemp("reference"), tied=False, seed=5))


def frozen(folder: str, dims: ParallelDims) -> FSDPEngine:
    return FSDPEngine(model=ModelConfig(path=folder), head="lm", sharding=FSDPConfig(), dims=dims, optim=None)


def step(case: Case, reference: str) -> dict[str, Any]:
    """KL before an update on it alone, the loss, and this rank's blocks before and after."""
    engine = build(case)
    engine.compare_with(frozen(reference, case.dims))
    rows = own_rows(rows_of(case), case.dims, dist.get_rank() if dist.is_initialized() else 0)
    before, counts = blocks(engine), engine.counts(rows)
    found = engine.forward(rows, KL, temperature=TEMPERATURE, micro=case.micro)["full_kl"]
    metrics = engine.update(rows, KLLoss(), temperature=TEMPERATURE, micro=case.micro, counts=counts)
    return {
        "kl": found,
        "loss": metrics["loss"],
        "before": before,
        "after": blocks(engine),
    }


def plain_kl(policy: torch.nn.Module, reference: torch.nn.Module, rows: Batch) -> Tensor:
    """``[b, T]`` by definition, one row at a time."""
    columns = []
    for i in range(len(rows)):
        p, r = int(rows["prompt_length"][i]), int(rows["response_length"][i])
        ids = torch.cat([rows["prompt_ids"][i, :p], rows["response_ids"][i, :r]])[None]
        both = [torch.log_softmax(model(input_ids=ids).logits[0] / TEMPERATURE, -1) for model in (policy, reference)]
        log_p, log_q = (log_probs[p - 1 : p + r - 1] for log_probs in both)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        columns.append(torch.nn.functional.pad(kl, (0, rows["response_ids"].shape[1] - r)))
    return torch.stack(columns)


@pytest.fixture(scope="module")
def expected(folders: tuple[str, str]) -> tuple[Tensor, float, dict[str, Tensor]]:
    """KL, loss and gradient by definition in float64."""
    policy, reference = (reference_model(folder, "lm")[0].double() for folder in folders)
    rows = make_rows(8)
    kl = plain_kl(policy, reference, rows)
    loss = torch.where(rows["loss_mask"], kl, 0.0).sum() / rows["loss_mask"].sum()
    loss.backward()
    return kl.detach().float(), float(loss.detach()), {n: p.grad.float() for n, p in policy.named_parameters()}


@pytest.mark.parametrize(
    "dims",
    [ParallelDims(), ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(sp=2)],
    ids=["one rank", "dp 2", "tp 2", "sp 2"],
)
def test_value_loss_and_gradient_equal_the_definition_at_every_layout(folders, expected, dims: ParallelDims) -> None:
    """float32 against float64: KL of about 1 nat within 1e-5, gradients within 1e-5."""
    assert_equals_the_definition(folders, expected, Case(folders[0], dims=dims))


@pytest.mark.parametrize(
    ("dims", "schedule"),
    [
        (ParallelDims(pp=2), "1f1b"),
        (ParallelDims(pp=2), "torch_gpipe"),
        (ParallelDims(pp=2, sp=2), "torch_1f1b"),
        (ParallelDims(pp=2, dp_shard=2), "1f1b"),
        pytest.param(ParallelDims(pp=2, tp=2), "1f1b", marks=pytest.mark.slow),
        pytest.param(ParallelDims(pp=2, dp_shard=2, tp=2), "torch_1f1b", marks=pytest.mark.slow),
    ],
    ids=lambda part: str({axis: n for axis, n in part.degrees.items() if n > 1}) if hasattr(part, "degrees") else None,
)
def test_stages_compare_as_one_process_does(folders, expected, dims: ParallelDims, schedule: str) -> None:
    assert_equals_the_definition(folders, expected, Case(folders[0], dims=dims, engine={"pipeline_schedule": schedule}))


def assert_equals_the_definition(folders, expected, case: Case) -> None:
    kl, loss, gradients = expected
    dims = case.dims
    ranks = [step(case, folders[1])] if dims.world == 1 else run_ranks(dims.world, step, case, folders[1])
    for rank, found in enumerate(ranks):
        mine = own_rows(Batch({"kl": kl}), dims, rank)["kl"]
        torch.testing.assert_close(found["kl"], mine, atol=1e-5, rtol=1e-5)
        assert found["loss"] == pytest.approx(loss, abs=1e-5)
    before, after = (assemble([rank[key] for rank in ranks]) for key in ("before", "after"))
    assert float(max(gradient.abs().max() for gradient in gradients.values())) > 0.01
    for name, gradient in gradients.items():
        torch.testing.assert_close(before[name] - after[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("micro", [MicroBatching(max_rows=1), MicroBatching(max_tokens=25)], ids=["rows", "tokens"])
def test_micro_batches_do_not_change_it(folders, expected, micro: MicroBatching) -> None:
    found = step(Case(folders[0], micro=micro), folders[1])
    torch.testing.assert_close(found["kl"], expected[0], atol=1e-5, rtol=1e-5)
    assert found["loss"] == pytest.approx(expected[1], abs=1e-5)


def test_encoding_the_prompt_of_a_group_once_does_not_change_it(folders) -> None:
    """Both models read the same packed rows, whoever shares prompts; sums come in another order."""
    groups: dict[str, Any] = {"rows": 6, "prompt_of": (0, 0, 2, 0, 2, 2)}
    plain = step(Case(folders[0], **groups), folders[1])
    shared = step(Case(folders[0], **groups, engine={"share_prompts": True}), folders[1])
    torch.testing.assert_close(shared["kl"], plain["kl"], atol=1e-5, rtol=1e-5)
    assert shared["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    for name, (_, _, value) in shared["after"].items():
        torch.testing.assert_close(value, plain["after"][name][2], atol=1e-5, rtol=1e-4)


def lora_step(case: Case) -> dict[str, Any]:
    engine = build(case)
    engine.compare_with(engine)
    rows = own_rows(rows_of(case), case.dims, dist.get_rank() if dist.is_initialized() else 0)
    settings: dict[str, Any] = {"temperature": TEMPERATURE, "micro": case.micro}
    start = engine.forward(rows, KL, **settings)["full_kl"]
    engine.update(rows, PushAway(), counts=engine.counts(rows), **settings)
    moved, merged = engine.forward(rows, KL, **settings)["full_kl"], blocks(engine)
    metrics = engine.update(rows, KLLoss(), counts=engine.counts(rows), **settings)
    return {
        "start": start,
        "moved": moved,
        "merged": merged,
        "loss": metrics["loss"],
        "norm": metrics["grad/norm"],
    }


@dataclass(frozen=True)
class PushAway:
    """Minus the mean log-prob: moves the policy."""

    needs: frozenset[str] = frozenset({"log_probs"})

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, dict[str, Metric]]:
        assert outputs.log_probs is not None
        return -torch.where(rows["loss_mask"], outputs.log_probs, 0.0).sum() / counts.tokens, {}


def test_with_lora_the_reference_is_the_engine_without_its_adapters(folders) -> None:
    """KL 0 at the start, exactly; after a step that of the merged weights and the base by definition."""
    found = lora_step(Case(folders[0], model=LORA))
    assert float(found["start"].abs().max()) == 0.0
    assert found["norm"] > 1e-4
    rows = make_rows(8)
    merged, base = (reference_model(folders[0], "lm")[0] for _ in range(2))
    merged.load_state_dict(assemble([found["merged"]]))
    with torch.no_grad():
        want = plain_kl(merged, base, rows)
    assert float(want.max()) > 1e-3
    torch.testing.assert_close(found["moved"], want, atol=1e-5, rtol=1e-4)
    masked = torch.where(rows["loss_mask"], want, 0.0).sum() / rows["loss_mask"].sum()
    assert found["loss"] == pytest.approx(float(masked), abs=1e-5)


@pytest.mark.parametrize(
    "dims", [ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(pp=2)], ids=["dp 2", "tp 2", "pp 2"]
)
def test_two_ranks_and_one_see_the_same_lora_kl(folders, dims: ParallelDims) -> None:
    one = lora_step(Case(folders[0], model=LORA))
    for rank, found in enumerate(run_ranks(2, lora_step, Case(folders[0], dims=dims, model=LORA))):
        mine = own_rows(Batch({"kl": one["moved"]}), dims, rank)["kl"]
        torch.testing.assert_close(found["moved"], mine, atol=1e-5, rtol=1e-4)
        assert found["loss"] == pytest.approx(one["loss"], abs=1e-5)


def test_a_kl_without_a_reference_and_layouts_that_differ_are_refused(folders) -> None:
    engine = build(Case(folders[0]))
    with pytest.raises(EngineError, match="compare_with"):
        engine.forward(make_rows(2), KL, temperature=1.0, micro=MicroBatching(max_rows=1))
    other = frozen(folders[1], ParallelDims())
    other.dims = ParallelDims(tp=2)
    with pytest.raises(ConfigError, match="tp 1 x sp 1 x pp 1, the reference tp 2"):
        engine.compare_with(other)
