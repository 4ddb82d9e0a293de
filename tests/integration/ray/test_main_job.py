"""The command that people type, as they type it: real Ray, real FSDP2, real vLLM, in processes of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save_tiny_model

SMALL = (
    "data.train_batch_size=8",
    "data.generated_val_size=16",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=2",
    "trainer.logger=[jsonl]",
)
LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_merge=False",
    "actor_rollout_ref.actor.optim.lr=3e-3",
)
TIMES = ("timing_s/", "perf/", "publish/", "residency/")


def _main_ppo(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Metrics by step of ``python -m hybridflow.main_ppo`` with ``SMALL`` and overrides."""
    command = [sys.executable, "-m", "hybridflow.main_ppo", *SMALL, f"trainer.default_local_dir={folder}", *overrides]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = [row for row in rows if "actor/optimizer_steps" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["actor/optimizer_steps"] == 2 and row["actor/grad_skipped"] == 0
        assert row["training/rollout_log_prob_diff/max"] < 1e-4 and row["training/rollout_log_prob_diff/mean"] < 5e-6
    return steps


@pytest.fixture(scope="module")
def grpo(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """Folder and metrics of the plain job on one rank."""
    folder = tmp_path_factory.mktemp("grpo")
    return folder, _main_ppo(folder / "run", "trainer.save_freq=2", f"trainer.rollout_data_dir={folder / 'rollouts'}")


@pytest.mark.vllm
@pytest.mark.ray
def test_grpo_runs_on_ray_and_vllm_and_leaves_its_outputs(grpo):
    folder, rows = grpo
    steps = _trained(rows)
    assert rows[0]["step"] == 0 and any(name.startswith("val-core/") for name in rows[0])
    assert all(row["publish/bytes"] == 0 for row in steps)  # one rank: nothing has to travel
    assert (folder / "run" / "resolved_config.yaml").is_file()
    assert (folder / "run" / "global_step_2" / "manifest.json").is_file()
    samples = [json.loads(line) for line in (folder / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert len(samples) == 32 and {"prompt", "response", "score", "finish_reason"} <= samples[0].keys()


@pytest.mark.vllm
@pytest.mark.ray
def test_two_workers_share_one_tensor_parallel_generator_and_give_the_numbers_of_one(grpo, tmp_path):
    one = _trained(grpo[1])
    two = _trained(
        _main_ppo(
            tmp_path / "two",
            "trainer.val_before_train=False",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        )
    )
    assert two[0]["publish/ratio_to_bound"] <= 1.05
    for name in ("critic/score/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy_old"):
        assert two[0][name] == pytest.approx(one[0][name], abs=1e-4), name


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.parametrize(("tp", "lora"), [(1, ()), (2, LORA)], ids=["tp1", "tp2, adapters only"])
def test_a_generator_on_its_own_processes_gets_every_step_over_the_wire(tmp_path, tp, lora):
    steps = _trained(
        _main_ppo(
            tmp_path,
            "trainer.val_before_train=False",
            "trainer.n_gpus_per_node=2",
            "trainer.pools.sampling.slots=[2]",
            "trainer.pools.sampling.roles=[rollout]",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}",
            "actor_rollout_ref.rollout.checkpoint_engine.verify=always",
            *lora,
        )
    )
    for row in steps:
        # the second step samples from weights that an update has changed and a publish has moved
        assert row["training/rollout_log_prob_diff/max"] < 1e-5
        assert row["publish/bytes"] == row["publish/sent_bytes"] == row["publish/bound_bytes"] > 0
        assert row["publish/local_bytes"] == 0
    assert steps[1]["actor/grad_norm"] > 0


@pytest.mark.vllm
@pytest.mark.ray
def test_ppo_with_critic_reference_and_kl_in_the_reward_runs_on_two_ranks(tmp_path):
    rows = _main_ppo(
        tmp_path,
        "preset=ppo",
        "actor_rollout_ref.rollout.n=1",
        "trainer.val_before_train=False",
        "trainer.n_gpus_per_node=2",
        "trainer.critic_warmup=1",
    )
    first, second = [row for row in rows if "critic/vf_loss" in row]
    assert "actor/pg_loss" not in first and "actor/pg_loss" in second  # the critic learns alone at first
    assert math.isfinite(first["critic/vf_loss"]) and first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.ray
def test_a_mixture_of_experts_runs_on_two_ranks_that_share_one_generator(tmp_path):
    """Cheaper parts of it run always: tests/integration/vllm/test_vllm_publish.py, test_engine_choices.py."""
    sizes = {"hidden_size": 128, "head_dim": 32}  # vLLM's attention takes heads of 32 on a CPU
    folder = save_tiny_model(tmp_path / "model", family="qwen3_moe", tied=False, **sizes)
    steps = _trained(
        _main_ppo(
            tmp_path / "run",
            "trainer.val_before_train=False",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "actor_rollout_ref.rollout.checkpoint_engine.verify=always",
            "actor_rollout_ref.actor.entropy_coeff=0.1",  # a random model earns nothing
            f"actor_rollout_ref.model.path={folder}",
        )
    )
    for row in steps:
        assert row["training/rollout_log_prob_diff/max"] < 1e-5 and row["publish/ratio_to_bound"] == 1.0
        assert row["actor/grad_norm"] > 0


INTEGRATION = Path(__file__).parents[1]
OTHER_DATAFLOWS = {
    "safe-rlhf": (
        "algorithm.adv_estimator=gae",
        "algorithm.safe_rlhf.enable=True",
        f"reward.custom_reward_function.path={INTEGRATION / 'reward_with_cost.py'}",
    ),
    "remax": ("algorithm.adv_estimator=remax",),
    "ppo-ptx with the exact KL on two ranks": (
        "algorithm.ptx_coef=0.1",
        f"algorithm.ptx_files=[{INTEGRATION / 'text.txt'}]",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=full",
    ),
}
LEAVES = {
    "safe-rlhf": ("safe_rlhf/multiplier", "safe_rlhf/cost/mean", "timing_s/update_cost_critic"),
    "remax": ("critic/advantages/mean",),
    "ppo-ptx with the exact KL on two ranks": ("actor/ptx_loss", "actor/kl_loss"),
}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.parametrize("name", OTHER_DATAFLOWS)
def test_every_other_dataflow_runs_on_ray_and_vllm(tmp_path, name):
    """Two steps each, with the metric that only this dataflow has."""
    steps = _trained(_main_ppo(tmp_path, "trainer.val_before_train=False", *OTHER_DATAFLOWS[name]))
    for step in steps:
        assert all(math.isfinite(step[metric]) for metric in LEAVES[name])
        assert math.isfinite(step["actor/pg_loss"])
    assert steps[1]["actor/grad_norm"] > 0


@pytest.mark.ray
def test_a_ray_group_and_this_process_give_the_same_numbers(tmp_path):
    overrides = ("actor_rollout_ref.rollout.name=hf", "trainer.val_before_train=False", "trainer.threads_per_worker=1")
    ray = _trained(_main_ppo(tmp_path / "ray", *overrides))
    local = _trained(_main_ppo(tmp_path / "local", *overrides, "trainer.controller=local"))
    for one, other in zip(ray, local, strict=True):
        assert one.keys() == other.keys()
        differing = {k for k in one if not k.startswith(TIMES) and one[k] != other[k]}
        assert not differing
