"""The plan's estimate of memory against what the ranks of a real world allocate: stages, slices, shards, precision.

As test_memory_estimate.py, which measures whole jobs of one rank: prompts and responses of the longest length, 20 %.
The estimate means the rank that holds most, so that is the one it is compared with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hybridflow.batch.batch import Batch
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.launch.preflight import plan_run
from hybridflow.workers.actor import _micro_batchings
from hybridflow.workers.profiler import allocations
from tests.invariants.training_steps import LOSSES
from tests.jobs import small_config
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

POLICY, PROMPT, RESPONSE, ROWS = "actor_rollout_ref", 6, 58, 16
ACTOR = f"{POLICY}.actor"
SIZES: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=704, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2,
    head_dim=32, extra_rows=2000,
)  # fmt: skip
PP = {f"{ACTOR}.pipeline_parallel_size": 2}
FOUR_MICRO_BATCHES = {f"{ACTOR}.ppo_max_token_len_per_gpu": 4 * (PROMPT + RESPONSE)}
BF16 = {f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "bf16"}
CHECKPOINTED = {f"{POLICY}.model.enable_gradient_checkpointing": True}
SELECTIVE = {**CHECKPOINTED, f"{POLICY}.model.gradient_checkpointing_mode": "selective"}
WORLDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "one, checkpointed": (True, {"trainer.n_gpus_per_node": 1, **CHECKPOINTED}),
    "one, selectively checkpointed": (True, {"trainer.n_gpus_per_node": 1, **SELECTIVE}),
    "pp 2 tied": (True, {**PP, **FOUR_MICRO_BATCHES}),
    "pp 2 untied": (False, {**PP, **FOUR_MICRO_BATCHES}),
    "pp 2 untied, torch_1f1b": (False, {**PP, **FOUR_MICRO_BATCHES, f"{ACTOR}.pipeline_schedule": "torch_1f1b"}),
    "pp 2 untied, torch_gpipe": (False, {**PP, **FOUR_MICRO_BATCHES, f"{ACTOR}.pipeline_schedule": "torch_gpipe"}),
    "tp 2": (True, {f"{ACTOR}.tensor_parallel_size": 2, **FOUR_MICRO_BATCHES}),
    "sp 2": (True, {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{ACTOR}.ppo_max_token_len_per_gpu": 128}),
    "dp 2, ZeRO-3": (True, FOUR_MICRO_BATCHES),
    "dp 2, ZeRO-2": (True, {**FOUR_MICRO_BATCHES, f"{ACTOR}.zero_stage": 2}),
    "dp 2, replicas": (True, {**FOUR_MICRO_BATCHES, f"{ACTOR}.zero_stage": 0}),
    "dp 2, bf16": (True, {**FOUR_MICRO_BATCHES, **BF16}),
    "one, bf16": (True, {**FOUR_MICRO_BATCHES, **BF16, "trainer.n_gpus_per_node": 1}),
}


def config_of(folder: str, change: dict[str, Any]) -> Any:
    shape = {"data.max_prompt_length": PROMPT, "data.max_response_length": RESPONSE, f"{POLICY}.rollout.n": 1}
    batch = {"data.train_batch_size": ROWS, f"{ACTOR}.ppo_mini_batch_size": ROWS, f"{ACTOR}.entropy_coeff": 0.01}
    batch["algorithm.adv_estimator"] = "reinforce_plus_plus"
    given = {**shape, **batch, "trainer.n_gpus_per_node": 2, f"{POLICY}.model.path": folder, **change}
    return small_config(Path(folder) / "run", **given)


def longest_rows(count: int, words: int) -> Batch:
    g = torch.Generator().manual_seed(3)
    mask = torch.ones(count, RESPONSE, dtype=torch.bool)
    return Batch(
        {
            "prompt_ids": torch.randint(4, words, (count, PROMPT), generator=g),
            "prompt_length": torch.full((count,), PROMPT),
            "response_ids": torch.randint(4, words, (count, RESPONSE), generator=g),
            "response_length": torch.full((count,), RESPONSE),
            "loss_mask": mask,
            "old_log_probs": torch.full((count, RESPONSE), -3.0),
            "advantages": torch.randn(count, RESPONSE, generator=g),
        }
    )


def measured(folder: str, change: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds after two updates, and what the second one and a forward allocate at their peaks."""
    config = config_of(folder, change)
    policy = config.actor_rollout_ref
    dims = plan_run(config).role("actor").dims
    engine = FSDPEngine(
        model=policy.model, head="lm", sharding=policy.actor.sharding, dims=dims, optim=policy.actor.optim,
        pipeline_schedule=policy.actor.pipeline_schedule,
    )  # fmt: skip
    rows = longest_rows(ROWS // dims.dp, SIZES["extra_rows"])
    update, forward = _micro_batchings(policy, dims.sp)
    counts = engine.counts(rows)
    peaks = {}
    for call in ("first", "update_actor", "compute_log_prob"):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
            if call == "compute_log_prob":
                engine.forward(rows, frozenset({"log_probs"}), temperature=1.0, micro=forward)
            else:
                engine.update(rows, LOSSES["lm"], temperature=1.0, micro=update, counts=counts)
        peaks[call], _, largest = allocations(session.profiler.kineto_results.experimental_event_tree())
        if call == "update_actor":
            big = dict(sorted(largest.items(), key=lambda item: -item[1])[:8])
    held = engine.held_bytes()
    return {"held": held["parameters"] + held["optimizer"], "peaks": peaks, "largest": big}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    return {
        tied: str(save_tiny_model(tmp_path_factory.mktemp("model"), family="llama", tied=tied, **SIZES))
        for tied in (True, False)
    }


@pytest.mark.parametrize("world", WORLDS)
def test_the_rank_that_holds_most_holds_what_the_plan_says(world: str, folders: dict[bool, str]) -> None:
    tied, change = WORLDS[world]
    plan = plan_run(config_of(folders[tied], change))
    line = next(line for line in plan.memory if line.role == "actor")
    ranks = run_ranks(plan.role("actor").dims.world, measured, folders[tied], change)
    resident, told = sum(line.resident.values()), []
    for call in ("update_actor", "compute_log_prob"):
        if call not in line.phases:
            continue
        planned = resident + sum(line.phases[call].values())
        seen = [rank["held"] + rank["peaks"][call] for rank in ranks]
        told.append(f"{call}: planned {planned:,}, measured {seen} = {planned / max(seen):.2f}")
        told.append(f"   {dict(line.resident)} {dict(line.phases[call])} / {[rank['held'] for rank in ranks]}")
    told += [str(rank["largest"]) for rank in ranks]
    print("\n".join(told))
    for call in ("update_actor", "compute_log_prob"):
        if call in line.phases:
            planned = resident + sum(line.phases[call].values())
            assert 0.8 < planned / max(rank["held"] + rank["peaks"][call] for rank in ranks) < 1.2, "\n".join(told)
