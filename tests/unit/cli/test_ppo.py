from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.cli.front import BAD_CONFIG, BAD_MACHINE, OK
from hybridflow.cli.ppo import main

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
SCRIPT = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=builtin:arithmetic",
    "data.val_files=builtin:arithmetic",
    "data.train_batch_size=64",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "actor_rollout_ref.model.path=builtin:arithmetic",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0",
    'trainer.logger=["console"]',
    "trainer.project_name=example",
    "trainer.experiment_name=function_rm",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
]
"""The keys of a typical GRPO script of verl, all of them, with small sizes."""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_prints_the_plan(capsys):
    assert main(["--dry-run", "data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]) == OK
    shown = capsys.readouterr().out
    for words in (
        "prompts per trainer step",
        "1,024",
        "Placement",
        "rollout_log_probs",
        "OMP_NUM_THREADS",
        "This machine",
    ):
        assert words in shown


def test_what_the_machine_lacks_is_fatal_for_a_dry_run_only_when_strict(capsys):
    arguments = ["--dry-run", "actor_rollout_ref.model.path=/nowhere/model"]
    assert main(arguments) == OK
    assert "/nowhere/model does not exist" in capsys.readouterr().out
    assert main([*arguments, "--strict"]) == BAD_MACHINE
    assert "actor_rollout_ref.model.path" in capsys.readouterr().err


def test_a_bad_configuration_fails_a_dry_run(capsys):
    assert main(["--dry-run", "actor_rollout_ref.rollout.n=1"]) == BAD_CONFIG
    assert "actor_rollout_ref.rollout.n" in capsys.readouterr().err


def test_a_typical_script_of_verl_runs_with_only_the_module_name_changed(capsys):
    assert main([*SCRIPT, "--dry-run"]) == OK
    assert "4 replicas x tp 2" in capsys.readouterr().out


def test_a_dry_run_of_the_real_command_takes_seconds_imports_no_torch_and_leaves_nothing(tmp_path):
    code = (
        "import sys\n"
        "from hybridflow.cli.ppo import main\n"
        "code = main(['--dry-run'])\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == OK, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: the wall clock of a busy test machine says nothing. 0.9 s on the machine where this was written.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert list(tmp_path.iterdir()) == []
