"""Choices of the training engine, through the main job: padded vocabularies, LoRA, optimizers, schedules, costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.launch.preflight import check_machine, plan_run
from tests.jobs import run_job, small_config
from tests.tiny import save_tiny_model

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
LORA = {f"{MODEL}.lora_rank": 4, f"{MODEL}.lora_alpha": 8.0, f"{ACTOR}.optim.lr": 1e-2}


def _agrees_with_the_sampler(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert step["training/rollout_log_prob_diff/max"] < 1e-4


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_rows_of_the_embedding_beyond_the_tokenizer_have_no_probability(tmp_path, tied):
    """The sampler never draws them, and the trainer must not count them: a random model gives them a fifth of all."""
    folder = save_tiny_model(tmp_path / "model", tied=tied, extra_rows=10)
    options = {f"{MODEL}.path": str(folder), f"{ACTOR}.use_kl_loss": True, "algorithm.adv_estimator": "gae"}
    steps = run_job(tmp_path / "run", **options)
    _agrees_with_the_sampler(steps)
    assert steps[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)


def test_a_mixture_of_experts_is_trained_published_and_saved_as_its_folder_has_it(tmp_path):
    folder = save_tiny_model(tmp_path / "model", family="qwen3_moe")
    options = {f"{MODEL}.path": str(folder), "trainer.save_freq": 2, f"{ACTOR}.use_kl_loss": True}
    contents = {f"{ACTOR}.checkpoint.save_contents": ["hf_model"], f"{ACTOR}.checkpoint.load_contents": []}
    steps = run_job(tmp_path / "run", **options, **contents)
    _agrees_with_the_sampler(steps)
    assert steps[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    saved = tmp_path / "run" / "global_step_2" / "actor" / "huggingface"
    before, after = (load_file(path / "model.safetensors") for path in (folder, saved))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(4)} <= moved


def test_lora_trains_adapters_and_its_reference_is_the_actor_without_them(tmp_path):
    options = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.01, **LORA}
    steps = run_job(tmp_path, **options, **{"trainer.total_training_steps": 3, f"{ACTOR}.ppo_mini_batch_size": 8})
    _agrees_with_the_sampler(steps)  # merged weights were published
    assert steps[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert steps[2]["actor/kl_loss"] > 1e-6
    assert all(step["actor/grad_norm"] > 0 for step in steps)


def test_adapters_may_travel_alone_and_give_the_numbers_of_merged_weights(tmp_path):
    steps = {merge: run_job(tmp_path / str(merge), **LORA, **{f"{MODEL}.lora_merge": merge}) for merge in (True, False)}
    _agrees_with_the_sampler(steps[False])
    for whole, adapters in zip(steps[True], steps[False], strict=True):
        assert adapters["publish/local_bytes"] < 0.2 * whole["publish/local_bytes"]  # one rank: nothing on a wire
    # both sample from the same start; later, a rounding of the merge may turn a token
    assert steps[False][0]["actor/grad_norm"] == pytest.approx(steps[True][0]["actor/grad_norm"], rel=1e-4)


def test_muon_learns_in_the_main_job(tmp_path):
    adamw = run_job(tmp_path / "adamw")
    muon = run_job(tmp_path / "muon", **{f"{ACTOR}.optim.optimizer": "Muon"})
    _agrees_with_the_sampler(muon)
    assert muon[0]["actor/grad_skipped"] == 0
    assert muon[1]["actor/grad_norm"] != adamw[1]["actor/grad_norm"]


def test_the_schedule_can_tick_with_every_optimizer_step(tmp_path):
    options = {f"{ACTOR}.optim.lr_scheduler_type": "linear", f"{ACTOR}.optim.schedule_unit": "optimizer_step"}
    steps = run_job(tmp_path / "fine", **options)  # two steps of two mini-batches: four ticks
    assert [step["actor/lr"] for step in steps] == pytest.approx([0.75e-3, 0.25e-3])
    steps = run_job(tmp_path / "coarse", **{f"{ACTOR}.optim.lr_scheduler_type": "linear"})
    assert [step["actor/lr"] for step in steps] == pytest.approx([1e-3, 0.5e-3])


def test_a_step_reports_what_it_cost(tmp_path):
    step = run_job(tmp_path, **{"algorithm.adv_estimator": "gae"})[1]
    for role in ("actor", "critic"):
        assert 0 < step[f"perf/mfu/{role}"] < 1.5
        assert step[f"perf/tokens_per_second_per_device/{role}"] > 0
        assert step[f"perf/padding_share/{role}"] == 0.0 and step[f"perf/imbalance/{role}"] == 1.0
    for phase in ("compute_log_prob", "update_actor", "compute_values", "update_critic"):
        assert step[f"perf/max_memory_gb/{phase}"] > 0.05


def test_what_only_gpus_have_is_said_before_anything_starts(tmp_path):
    options = {f"{MODEL}.use_liger": True, f"{MODEL}.enable_activation_offload": True, "trainer.device": "cpu"}
    config = small_config(tmp_path, **options)
    found = {finding.what: finding.level for finding in check_machine(config, plan_run(config))}
    assert found[f"{MODEL}.use_liger"] == "error"
    assert found[f"{MODEL}.enable_activation_offload"] == "warning"


def test_compilation_on_a_cpu_is_refused_before_anything_starts(tmp_path):
    config = small_config(tmp_path, **{f"{ACTOR}.use_torch_compile": True, "trainer.device": "cpu"})
    errors = [finding for finding in check_machine(config, plan_run(config)) if finding.level == "error"]
    assert [finding.what for finding in errors] == [f"{ACTOR}.use_torch_compile"]
