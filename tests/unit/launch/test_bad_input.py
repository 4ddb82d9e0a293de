"""Bad input of issue 2, section 6: dotted key, what is allowed, a suggestion, and nothing started."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fsspec.registry import known_implementations
from safetensors.torch import save_file

from hybridflow.config.load import load_config
from hybridflow.data.builtin import ensure_builtin_model
from hybridflow.launch.findings import fatal
from hybridflow.launch.foreign_names import ray_arguments
from hybridflow.launch.hf_model import hub_answers
from hybridflow.launch.machine import Gpu, Machine
from hybridflow.launch.preflight import check_machine, plan_run
from hybridflow.utils.errors import HybridFlowError
from hybridflow.utils.optional import load
from tests.unit.config.trees import tree

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
LAPTOP = Machine(cores=2, memory_bytes=8 << 30, available_bytes=6 << 30, torch_build="2.13.0+cpu")
TWO_GPUS = Machine(
    cores=16, memory_bytes=64 << 30, available_bytes=60 << 30, gpus=(Gpu("H100", 80 << 30),) * 2, torch_build="2.13.0"
)
POLICY = "actor_rollout_ref"
ACTOR, REF, ROLLOUT = f"{POLICY}.actor", f"{POLICY}.ref", f"{POLICY}.rollout"


def judge(*overrides: str, machine: Machine = LAPTOP) -> None:
    """What ``main_ppo`` does before it starts anything."""
    config = load_config(tree(*overrides))
    lacking = fatal(check_machine(config, plan_run(config, machine), machine))
    if lacking is not None:
        raise lacking


BAD = [
    # (overrides, dotted key in the message, what else it must say)
    (["data.train_batchsize=8"], "data.train_batchsize", "Did you mean data.train_batch_size?"),
    (["algorithm.adv_estimator=grppo"], "algorithm.adv_estimator=grppo", "Did you mean grpo?"),
    ([f"{ACTOR}.policy_loss.loss_mode=gsppo"], f"{ACTOR}.policy_loss.loss_mode=gsppo", "Did you mean gspo?"),
    ([f"{ACTOR}.kl_loss_type=low_var"], f"{ACTOR}.kl_loss_type=low_var", "Did you mean low_var_kl"),
    (["algorithm.kl_penalty=klk"], "algorithm.kl_penalty=klk", "Did you mean kl?"),
    (["algorithm.kl_ctrl.type=adaptiv"], "algorithm.kl_ctrl.type=adaptiv", "Did you mean adaptive?"),
    ([f"{ACTOR}.loss_agg_mode=token_mean"], f"{ACTOR}.loss_agg_mode=token_mean", "Did you mean token-mean?"),
    (["trainer.logger=[console,wanbd]"], "trainer.logger=wanbd", "Did you mean wandb?"),
    ([f"{ACTOR}.strategy=fsdp3"], f"{ACTOR}.strategy=fsdp3", "one of fsdp, fsdp2"),
    ([f"{ROLLOUT}.name=vlm"], f"{ROLLOUT}.name=vlm", "Did you mean vllm?"),
    (["trainer.resume_mode=atuo"], "trainer.resume_mode=atuo", "Did you mean auto?"),
    (["data.truncation=middel"], "data.truncation=middel", "Did you mean middle?"),
    ([f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n=1", f"Set {ROLLOUT}.n=8"),
    (["algorithm.adv_estimator=tir_optimal_token_baseline", "algorithm.rollout_correction.bypass_mode=True"],
     "algorithm.rollout_correction.bypass_mode=True", "which bypass_mode does not compute"),
    (["algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is_batch_normalize=True"],
     "algorithm.rollout_correction.rollout_is_batch_normalize=True", "Keep one of the two"),
    (["algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=token"],
     "algorithm.rollout_correction.rollout_is=token", "use algorithm.rollout_correction.loss_type=reinforce"),
    (["algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.guard_max_log_ratio=0.5"],
     "algorithm.rollout_correction.guard_max_log_ratio=0.5", "bypass_mode does not recompute"),
    (["algorithm.rollout_correction.loss_type=reinforce"], "algorithm.rollout_correction.loss_type=reinforce",
     "no effect without algorithm.rollout_correction.bypass_mode=True"),
    (["algorithm.rollout_correction.rollout_is_batch_normalize=True"],
     "algorithm.rollout_correction.rollout_is_batch_normalize=True", "no effect without"),
    (["algorithm.rollout_correction.rollout_rs_threshold=2"], "algorithm.rollout_correction.rollout_rs_threshold=2",
     "no effect without algorithm.rollout_correction.rollout_rs"),
    (["algorithm.rollout_correction.guard_action=stop"], "algorithm.rollout_correction.guard_action=stop",
     "no effect without algorithm.rollout_correction.guard_max_log_ratio"),
    ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full", "trainer.pools.apart.slots=[1]",
      "trainer.pools.apart.roles=[reference]"], f"{ACTOR}.kl_loss_type=full", "the reference lives apart"),
    ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full+", "trainer.n_gpus_per_node=2",
      f"{ACTOR}.pipeline_parallel_size=2"], f"{REF}.pipeline_parallel_size=1", "pipeline_parallel_size=2 must equal"),
    (["actor_rollout_ref.model.load_in_4bit=True"], "actor_rollout_ref.model.load_in_4bit", "QLoRA is not supported"),
    (["critic.model.quantization_config.bits=4"], "critic.model.quantization_config", "QLoRA is not supported"),
    (["actor_rollout_ref.model.gradient_checkpointing_mode=selective"],
     "actor_rollout_ref.model.gradient_checkpointing_mode=selective", "has no effect without"),
    ([f"{ACTOR}.optim.optimizer=torch.optim.Adam", f"{ACTOR}.optim.betas=[0.9,0.95]"], f"{ACTOR}.optim.betas=",
     f"Set {ACTOR}.optim.override_optimizer_config.betas"),
    (["algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=full", "trainer.n_gpus_per_node=2",
      f"{ACTOR}.tensor_parallel_size=2"], "actor_rollout_ref.ref.tensor_parallel_size=1", "Use 2."),
    (["algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=full",
      "algorithm.rollout_correction.bypass_mode=True"], "algorithm.kl_penalty=full", "bypass_mode does without"),
    (["algorithm.rollout_correction.rollout_rs='token_k1,seq_maxk2'"],
     "algorithm.rollout_correction.rollout_rs=token_k1,seq_maxk2", "Did you mean seq_max_k2?"),
    (["algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'",
      "algorithm.rollout_correction.rollout_rs_threshold='1,2,3'"],
     "algorithm.rollout_correction.rollout_rs_threshold=1,2,3", "has 3 entries for the 2 names"),
    (["algorithm.rollout_correction.rollout_rs=seq_mean_k3"],
     "algorithm.rollout_correction.rollout_rs_threshold=null", "k3 bound is one positive number"),
    (["algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=0.5"],
     "algorithm.rollout_correction.rollout_rs_threshold=0.5", "one number above 1"),
    (["algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.loss_type=reinforce",
      f"{ACTOR}.policy_loss.loss_mode=gspo"], f"{ACTOR}.policy_loss.loss_mode=gspo", "is not used"),
    (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.use_kl_in_reward=True"],
     "algorithm.use_kl_in_reward=True", f"Use {ACTOR}.use_kl_loss=True."),
    (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.reward_shaping.length_penalty=1"],
     "algorithm.reward_shaping.length_penalty=1.0", "reads components of the reward"),
    (["algorithm.rollout_correction.rollout_token_veto_threshold=1.5"],
     "algorithm.rollout_correction.rollout_token_veto_threshold=1.5", "above 0 and below 1"),
    (["reward.overlong.enable=True"], "reward.overlong.len=0", "the penalty grows"),
    (["reward.overlong.enable=True", "reward.overlong.len=4096"], "reward.overlong.len=4096", "before the limit of"),
    (["algorithm.safe_rlhf.enable=True", "algorithm.safe_rlhf.multiplier_init=0"],
     "algorithm.safe_rlhf.multiplier_init=0", "never grows"),
    (["algorithm.filter_groups.enable=True", "algorithm.adv_estimator=gae", f"{ROLLOUT}.n=1"],
     "algorithm.filter_groups.enable=True", f"Set {ROLLOUT}.n=8"),
    (["algorithm.safe_rlhf.enable=True", "algorithm.adv_estimator=remax"],
     "algorithm.safe_rlhf.enable=True", "adv_estimator=gae or grpo"),
    (["algorithm.ptx_coef=0.1"], "algorithm.ptx_files=[]", "Name .txt or .jsonl files"),
    (["algorithm.ptx_coef=0.1", "algorithm.ptx_files=[nowhere.txt]"],
     "algorithm.ptx_files", "nowhere.txt does not exist"),
    (["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n=1", "at least 2"),
    (["trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=3"],
     f"{ROLLOUT}.tensor_model_parallel_size=3", "does not divide the number of devices, 4"),
    (["trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=8"],
     f"{ROLLOUT}.tensor_model_parallel_size", "Use one of 1, 2, 4"),
    (["trainer.n_gpus_per_node=8", f"{ACTOR}.tensor_parallel_size=4"],
     f"{ACTOR}.tensor_parallel_size", "2 key-value heads"),
    (["trainer.n_gpus_per_node=8", f"{ACTOR}.ulysses_sequence_parallel_size=8"],
     f"{ACTOR}.ulysses_sequence_parallel_size", "4 attention heads"),
    (["trainer.n_gpus_per_node=8", f"{ACTOR}.pipeline_parallel_size=8"],
     f"{ACTOR}.pipeline_parallel_size", "8 stages for 3 layers"),
    ([f"{ACTOR}.pipeline_schedule=gpipe"], f"{ACTOR}.pipeline_schedule=gpipe", "Did you mean torch_gpipe?"),
    ([f"{ACTOR}.pipeline_schedule=torch_1f1b"], f"{ACTOR}.pipeline_schedule=torch_1f1b",
     f"Set {ACTOR}.pipeline_parallel_size=2"),
    (["algorithm.adv_estimator=gae", "critic.pipeline_schedule=torch_gpipe"], "critic.pipeline_schedule=torch_gpipe",
     "Set critic.pipeline_parallel_size=2"),
    (["actor_rollout_ref.ref.pipeline_schedule=torch_gpipe"], "actor_rollout_ref.ref.pipeline_schedule",
     "forward passes run micro-batch by micro-batch"),
    (["trainer.n_gpus_per_node=4", f"{ACTOR}.ulysses_sequence_parallel_size=3"],
     f"{ACTOR}.ulysses_sequence_parallel_size=3", "number of devices"),
    ([f"{ACTOR}.ppo_mini_batch_size=128"], f"{ACTOR}.ppo_mini_batch_size=128", "exceed the data.train_batch_size=64"),
    ([f"{ACTOR}.ppo_mini_batch_size=24"], f"{ACTOR}.ppo_mini_batch_size=24", "Use 16."),
    (["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=48"], "critic.ppo_mini_batch_size=48", "Use 32."),
    ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=1024"], f"{ACTOR}.ppo_micro_batch_size_per_gpu=1024", "exceeds the 512"),
    ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=48"], f"{ACTOR}.ppo_micro_batch_size_per_gpu=48", "Use 32."),
    (["trainer.n_gpus_per_node=3"], f"{ACTOR}.ppo_mini_batch_size=64", "do not divide over 3 data-parallel ranks"),
    ([f"{ACTOR}.ppo_max_token_len_per_gpu=20"], f"{ACTOR}.ppo_max_token_len_per_gpu=20", "Use 24 or more."),
    ([f"{ROLLOUT}.log_prob_max_token_len_per_gpu=20"], f"{ROLLOUT}.log_prob_max_token_len_per_gpu=20", "Use 24"),
    ([f"{ROLLOUT}.max_model_len=20"], f"{ROLLOUT}.max_model_len=20", "Use 24."),
    ([f"{ACTOR}.use_dynamic_bsz=false"], f"{ACTOR}.use_dynamic_bsz=False", "ppo_micro_batch_size_per_gpu"),
    ([f"{ACTOR}.optim.lr=-1e-6"], f"{ACTOR}.optim.lr=-1e-06", "at least 0"),
    ([f"{ROLLOUT}.gpu_memory_utilization=0"], f"{ROLLOUT}.gpu_memory_utilization=0.0", "above 0 and at most 1"),
    ([f"{ROLLOUT}.gpu_memory_utilization=1.2"], f"{ROLLOUT}.gpu_memory_utilization=1.2", "Use 1 or less"),
    ([f"{ROLLOUT}.temperature=0"], f"{ROLLOUT}.temperature=0.0", "above 0"),
    ([f"{ROLLOUT}.temperature=-1"], f"{ROLLOUT}.temperature=-1.0", "above 0"),
    ([f"{ROLLOUT}.val_kwargs.temperature=-1"], f"{ROLLOUT}.val_kwargs.temperature=-1.0", "at least 0"),
    ([f"{ROLLOUT}.top_p=0.9"], f"{ROLLOUT}.top_p=0.9", "must be 1"),
    ([f"{ROLLOUT}.top_k=50"], f"{ROLLOUT}.top_k=50", "at most 0"),
    (["algorithm.use_kl_in_reward=true", f"{ACTOR}.use_kl_loss=true"], "algorithm.use_kl_in_reward=True", "twice"),
    ([f"{ACTOR}.ppo_micro_batch_size=8"], f"{ACTOR}.ppo_micro_batch_size=8", "ppo_micro_batch_size_per_gpu"),
    (["trainer.pools.x.roles=[judge]"], "trainer.pools.x.roles=judge", "one of rollout, critic, reference, reward"),
    (["trainer.pools.x.roles=[critic]"], "trainer.pools.x.roles=[critic]", "no critic"),
    (["trainer.critic_warmup=3"], "trainer.critic_warmup=3", "no critic"),
    ([f"{ACTOR}.optim.lr_warmup_steps=32"], f"{ACTOR}.optim.lr_warmup_steps=32", "Use less than 32"),
    (["data.generated_size=10"], "data.generated_size=10", "Set data.generated_size=64"),
    (["trainer.resume_mode=resume_path"], "trainer.resume_mode=resume_path", "trainer.resume_from_path"),
    (["trainer.default_local_dir=s3://runs/1"], "trainer.default_local_dir=s3://runs/1", "trainer.checkpoint_copy"),
    (["trainer.rollout_data_dir=s3://runs/1"], "trainer.rollout_data_dir=s3://runs/1", "Give a folder"),
    (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=memory://runs/global_step_2"],
        "trainer.resume_from_path",
        "memory://runs/global_step_2 holds no complete checkpoint",
    ),
    (["ray_kwargs.ray_init.num_cpu=2"], "ray_kwargs.ray_init.num_cpu=2", "Did you mean num_cpus?"),
    (["ray_kwargs.ray_init._temp_dirs=/tmp/x"], "ray_kwargs.ray_init._temp_dirs=/tmp/x", "Did you mean _temp_dir?"),
    (["ray_kwargs.ray_init.foo.bar=1"], "ray_kwargs.ray_init.foo", "Its arguments: address, "),
    (["ray_kwargs.ray_init.num_cpus=two"], "ray_kwargs.ray_init.num_cpus=two", "a whole number of at least 0"),
    (["ray_kwargs.ray_init.runtime_env=3"], "ray_kwargs.ray_init.runtime_env=3", "runtime_env.NAME=VALUE"),
    (["ray_kwargs.ray_init.address=head"], "ray_kwargs.ray_init.address=head", "HOST:PORT, auto or local"),
    (["data.seed=-1"], "data.seed=-1", "Use 0 or more."),
    (["trainer.seed=99999999999"], "trainer.seed=99999999999", "Use 4294967295 or less."),
    (["trainer.resume_from_path=None"], "trainer.resume_from_path=None", "Write null for 'not set'."),
    ([f"{POLICY}.model.lora_rank=4", f"{POLICY}.model.target_modules=[q_proj,v_prj]"],
     f"{POLICY}.model.target_modules", "has no module v_prj. Write all-linear"),
    ([f"{POLICY}.model.lora_rank=4", f"{POLICY}.model.target_modules=q_proj"],
     f"{POLICY}.model.target_modules", "write [q_proj]"),
    ([f"{ACTOR}.optim.betas=[0.9]"], f"{ACTOR}.optim.betas=[0.9]", "a list of 2 numbers"),
    (["trainer.checkpoint_copy=s33://runs/1"], "trainer.checkpoint_copy=s33://runs/1", "Did you mean s3?"),
    (["trainer.checkpoint_copy=s3:/runs/1"], "trainer.checkpoint_copy=s3:/runs/1", "Write s3://runs/1."),
    (["trainer.checkpoint_copy=simplecach::memory://runs"], "trainer.checkpoint_copy=", "Did you mean simplecache?"),
    (["trainer.resume_mode=resume_path", "trainer.resume_from_path=hfds://runs/global_step_2"],
     "trainer.resume_from_path=hfds://runs/global_step_2", "Did you mean hdfs?"),
    (["reward.reward_model.enable=True"], "reward.reward_model.model.path=builtin:arithmetic", "sequence classifier"),
    (
        ["reward.reward_model.enable=True", "reward.reward_model.model.path=m", "reward.reward_model.zero_stage=4"],
        "reward.reward_model.zero_stage=4",
        "at most 3",
    ),
    (
        [
            "reward.reward_model.enable=True",
            "reward.reward_model.model.path=m",
            "reward.reward_model.tensor_parallel_size=2",
        ],
        "reward.reward_model.tensor_parallel_size=2",
        "number of devices of the reward_model, 1",
    ),
    (["trainer.save_freq=0"], "trainer.save_freq=0", "-1, or at least 1"),
    (["trainer.controller=local", "trainer.nnodes=2"], "trainer.nnodes=2", "trainer.controller=ray"),
    (["data.train_files=nowhere/x.parquet"], "data.train_files", "nowhere/x.parquet does not exist"),
    (["data.val_files=x.csv"], "data.val_files", "does not exist"),
    (["reward.custom_reward_function.path=nowhere.py"], "reward.custom_reward_function.path", "does not exist"),
    ([f"{POLICY}.model.path=/nowhere/model"], f"{POLICY}.model.path", "/nowhere/model does not exist"),
    (["trainer.device=cuda"], "trainer.device", "trainer.device=cpu"),
    (["data.max_response_length=120"], "data.max_response_length", "128 positions of the model"),
    ([f"{ACTOR}.checkpoint.save_contents=[modle]"], f"{ACTOR}.checkpoint.save_contents=modle", "Did you mean model?"),
    ([f"{ROLLOUT}.n=0"], f"{ROLLOUT}.n=0", "Use 1 or more"),
    ([f"{ROLLOUT}.n=two"], f"{ROLLOUT}.n=two", "must be an integer"),
    ([f"{ROLLOUT}.n=[8]"], f"{ROLLOUT}.n=[8]", "Write 8, without brackets"),
    ([f"{ROLLOUT}.n=8.5"], f"{ROLLOUT}.n=8.5", "Use 8 or 9"),
    ([f"{ROLLOUT}.n=null"], f"{ROLLOUT}.n=null", "Remove the key for its default"),
    ([f"{ROLLOUT}.n={{a: 1}}"], f"{ROLLOUT}.n={{a:1}}", "must be an integer"),
    (["data.train_batch_size=-64"], "data.train_batch_size=-64", "Use 1 or more"),
    (["data.train_batch_size=true"], "data.train_batch_size=True", "must be an integer"),
    (["data=5"], "data=5", "is a section"),
    ([f"{ACTOR}.optim=AdamW"], f"{ACTOR}.optim=AdamW", "is a section"),
    (["foo.bar.baz=1"], "foo.bar.baz", "no such key"),
    (["trainer.logger=null"], "trainer.logger=null", "Write [a,b]"),
    (["trainer.logger={console: 1}"], "trainer.logger", "list"),
    ([f"{POLICY}.model.path=''"], f"{POLICY}.model.path=", "a variable of the shell may not be set"),
    (["trainer.default_local_dir=''"], "trainer.default_local_dir=", "It is empty"),
    (["data.train_files=''"], "data.train_files=", "It is empty"),
    (["data.train_files='$DATA/train.parquet'"], "data.train_files", "${oc.env:NAME}"),
    ([f"{POLICY}.model.tokenizer_path=/nowhere/tokens"], f"{POLICY}.model.tokenizer_path", "does not exist"),
    (["algorithm.adv_estimator=no_module_of_mine:f"], "algorithm.adv_estimator", "Put its folder on PYTHONPATH"),
    (["algorithm.adv_estimator=tests.tiny_models_of_mine:f"], "algorithm.adv_estimator", "can be found"),
    ([f"{ACTOR}.policy_loss.loss_mode=json.decoder:JSONDecodr"], f"{ACTOR}.policy_loss.loss_mode",
     "Did you mean JSONDecoder?"),
    (["trainer.pools.x=rollout"], "trainer.pools.x=rollout", "is a section"),
    (["data.custom_cls.name=Rows"], "data.custom_cls.name=Rows", "Set data.custom_cls.path=FILE.py"),
    (["data.train_files=[]"], "data.train_files=[]", "Name a file"),
    (["reward.timeout_s=-1"], "reward.timeout_s=-1.0", "Use more than 0"),
    ([f"{ROLLOUT}.foo.bar=3"], f"{ROLLOUT}.foo.bar: no such key", f"Keys of {ROLLOUT}: "),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "words"), BAD, ids=[" ".join(row[0]) for row in BAD])
def test_bad_input_is_refused_with_key_limits_and_advice(overrides, key, words):
    with pytest.raises(HybridFlowError) as caught:
        judge(*overrides)
    assert key in str(caught.value)
    assert words in str(caught.value)


def test_a_home_folder_is_one():
    config = load_config(tree("trainer.default_local_dir=~/runs/1"))
    assert config.trainer.default_local_dir == str(Path.home() / "runs" / "1")


@pytest.mark.parametrize(
    "override",
    [
        "ray_kwargs.ray_init.num_cpus=2",
        "ray_kwargs.ray_init.address=auto",
        "ray_kwargs.ray_init.address=10.0.0.1:6379",
        f"{POLICY}.model.target_modules=[q_proj,mlp.up_proj]",
        f"{POLICY}.model.target_modules='.*layers.0.*q_proj'",
        "ray_kwargs.ray_init.num_cpu=null",
        "ray_kwargs.ray_init._temp_dir=/tmp/x",
        "ray_kwargs.ray_init.object_spilling_directory=/tmp/x",
        "ray_kwargs.ray_init.runtime_env.env_vars.A=1",
        "trainer.checkpoint_copy=memory://runs",
        "trainer.checkpoint_copy=simplecache::memory://runs",
        "trainer.checkpoint_copy=/tmp/a:b",
        "trainer.checkpoint_copy=file:///tmp/runs",
    ],
)
def test_names_that_ray_fsspec_and_the_model_know_are_let_through(override):
    judge(override, f"{POLICY}.model.lora_rank=4")


def test_a_malformed_ray_address_of_the_shell_is_told(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head")
    with pytest.raises(HybridFlowError, match="RAY_ADDRESS=head: must be HOST:PORT.*Unset it"):
        judge()
    judge("ray_kwargs.ray_init.address=local")
    judge("trainer.controller=local")


def test_a_file_system_whose_package_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(known_implementations, "rare", {"class": "no_such.Files", "err": "Install no_such"})
    with pytest.raises(HybridFlowError, match="trainer.checkpoint_copy: rare://x: Install no_such"):
        judge("trainer.checkpoint_copy=rare://x")


def test_every_argument_of_ray_init_is_known():
    signature = inspect.signature(load("ray:init")).parameters
    assert {name for name, of in signature.items() if of.kind is not of.VAR_KEYWORD} <= ray_arguments()
    assert {"_temp_dir", "_system_config"} <= ray_arguments()


def test_the_embedded_default_is_sound():
    judge()


def test_more_gpus_than_exist_is_an_error_that_counts_all_pools():
    judge("trainer.n_gpus_per_node=2", machine=TWO_GPUS)
    with pytest.raises(HybridFlowError, match=r"trainer\.n_gpus_per_node: 4 GPUs .* has 2"):
        judge("trainer.n_gpus_per_node=4", machine=TWO_GPUS)
    with pytest.raises(HybridFlowError, match=r"3 GPUs .*all pools together.* has 2"):
        judge(
            "trainer.n_gpus_per_node=2", "algorithm.adv_estimator=gae", "trainer.pools.v.roles=critic", machine=TWO_GPUS
        )


def test_logical_slots_on_a_cpu_may_exceed_the_cores():
    judge("trainer.n_gpus_per_node=8", machine=LAPTOP)


def row(**changes: object) -> dict[str, object]:
    found = {
        "prompt": "1+1=",
        "data_source": "exact_match",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 0},
        **changes,
    }
    return {name: value for name, value in found.items() if value is not None}


def write(folder: Path, rows: list[dict[str, object]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return str(file)


def test_a_good_file_is_let_through(tmp_path):
    judge(f"data.train_files={write(tmp_path, [row()] * 64)}")


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_data_file_that_lacks_a_column_names_it(tmp_path, column):
    with pytest.raises(HybridFlowError, match=column) as caught:
        judge(f"data.train_files={write(tmp_path, [row(**{column: None})] * 64)}")
    assert "data.train_files" in str(caught.value)
    assert "rows.jsonl" in str(caught.value)


def test_a_parquet_file_that_lacks_a_column_names_it(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([row(prompt=None)] * 64), file)
    with pytest.raises(HybridFlowError, match=r"data\.train_files.*prompt"):
        judge(f"data.train_files={file}")


@pytest.mark.parametrize(
    "source", ["builtin:arithmetics", "reasoning_gym:chain_summ", "reasoning_gym:chain_sum?max_term=2"]
)
def test_a_generator_that_does_not_exist_is_an_error(source):
    with pytest.raises(HybridFlowError, match=r"data\.train_files"):
        judge(f"data.train_files='{source}'")


def test_an_empty_file_and_one_that_cannot_fill_a_step_are_errors(tmp_path):
    with pytest.raises(HybridFlowError, match="has no row"):
        judge(f"data.train_files={write(tmp_path, [])}")
    with pytest.raises(HybridFlowError, match=r"data\.train_batch_size: 3 prompts cannot fill .*=64"):
        judge(f"data.train_files={write(tmp_path, [row()] * 3)}")


def test_a_filter_that_leaves_nothing_or_too_little_is_an_error(tmp_path):
    long = row(prompt="1" * 40)
    with pytest.raises(HybridFlowError, match=r"data\.max_prompt_length: 64 of 64 .*nothing is left.*=40"):
        judge(f"data.train_files={write(tmp_path, [long] * 64)}", "data.filter_overlong_prompts=true")
    with pytest.raises(HybridFlowError, match=r"3 prompts cannot fill .* \(61 of 64 are over"):
        rows = [long] * 61 + [row()] * 3
        judge(f"data.train_files={write(tmp_path, rows)}", "data.filter_overlong_prompts=true")
    with pytest.raises(HybridFlowError, match=r"data\.truncation=error"):
        judge(f"data.train_files={write(tmp_path, [long] * 64)}")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_bad_row_far_down_is_told_before_the_start(tmp_path, ending):
    rows = [row()] * 5000 + [row(prompt=[{"role": "user", "content": 3}])]
    file = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        file.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    else:
        import pyarrow as pa
        import pyarrow.parquet

        rows[-1] = row(prompt="")
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(HybridFlowError, match=r"data\.train_files: .*rows\..* row 5000, column 'prompt'"):
        judge(f"data.train_files={file}")


def test_an_over_long_prompt_far_down_is_told_before_the_start(tmp_path):
    rows = [row()] * 3000 + [row(prompt="1" * 40)] + [row()] * 3000
    with pytest.raises(HybridFlowError, match=r"1 of \d+ judged prompts .* and data.truncation=error.*length=40"):
        judge(f"data.train_files={write(tmp_path, rows)}")
    judge(f"data.train_files={write(tmp_path, rows)}", "data.filter_overlong_prompts=true")


def test_a_filter_that_leaves_only_what_stands_behind_the_first_thousand_is_fine(tmp_path):
    rows = [row(prompt="1" * 40)] * 1500 + [row()] * 64
    judge(f"data.train_files={write(tmp_path, rows)}", "data.filter_overlong_prompts=true")


def test_names_of_columns_are_those_of_files_not_of_generators(tmp_path):
    rows = [{"question" if name == "prompt" else name: value for name, value in row().items()}] * 64
    judge(f"data.train_files={write(tmp_path, rows)}", "data.prompt_key=question")


def test_validation_on_the_default_jobs_sums_beside_data_of_ones_own_is_noted(tmp_path):
    def notes(*overrides):
        return " ".join(plan_run(load_config(tree(*overrides)), LAPTOP).notes)

    file = write(tmp_path, [row()] * 64)
    assert "set data.val_files=FILE" in notes(f"data.train_files={file}")
    assert "data.val_files" not in notes(f"data.train_files={file}", f"data.val_files={file}") + notes()


def test_a_data_source_without_scorer_is_an_error_unless_a_function_is_given(tmp_path):
    file = write(tmp_path, [row(data_source="my/task")] * 64)
    with pytest.raises(HybridFlowError, match=r"reward\.custom_reward_function\.path.*my/task"):
        judge(f"data.train_files={file}")
    function = tmp_path / "reward.py"
    function.write_text("def compute_score(**kwargs):\n    return 1.0\n")
    judge(f"data.train_files={file}", f"reward.custom_reward_function.path={function}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "1+1=", \n', "line 1 is not valid json"),
        (b'{"prompt": "caf\xe9"}\n', "line 1 is not utf-8 text"),
        (b"\x80\x02\x00\x01", "line 1 is not utf-8 text"),
    ],
)
def test_a_file_with_a_broken_line_names_the_line(tmp_path, content, words):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(HybridFlowError, match=r"data\.train_files") as caught:
        judge(f"data.train_files={file}")
    assert words in str(caught.value)
    assert "Correct the file" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.json", '{"data": [1]}', "it has data"),
        ("rows.json", '{\n"data": [1]}', "it has data"),
        ("rows.json", '[{"prompt": 1}', "is not valid json"),
        ("rows.json", '["a"]', "an object with columns is expected"),
        ("rows.parquet", "no parquet", "not a readable parquet file"),
        ("rows.csv", "a,b", ".parquet, .jsonl, .json"),
    ],
)
def test_a_file_of_another_form_says_which_is_expected(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(HybridFlowError, match=r"data\.train_files") as caught:
        judge(f"data.train_files={tmp_path / name}")
    assert words in str(caught.value)


def test_a_folder_in_place_of_a_file_is_an_error(tmp_path):
    with pytest.raises(HybridFlowError, match=r"data\.train_files: .* is no file\. .*name a file in it"):
        judge(f"data.train_files={tmp_path}")
    with pytest.raises(HybridFlowError, match=r"reward\.custom_reward_function\.path: .* is no file"):
        judge(f"reward.custom_reward_function.path={tmp_path}")


def chat(**message: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": "1+1=", **message}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "a text or a chat list"),
        ({"prompt": 7}, "a text or a chat list"),
        ({"prompt": []}, "a text or a chat list"),
        ({"prompt": ["1+1="]}, "an object with role and content"),
        ({"prompt": [{"from": "human", "value": "1+1="}]}, "an object with role and content"),
        ({"prompt": chat(content=5)}, "content is a text, got 5"),
        ({"prompt": chat(role=None)}, "role is a text, got None"),
        ({"prompt": chat(content=[{"type": "image"}])}, "text only, content has image"),
        ({"data_source": 3}, "the scorer's name is expected, got 3"),
        ({"reward_model": "2"}, "an object with ground_truth is expected"),
        ({"extra_info": 5}, "an object is expected, got 5"),
        ({"prompt": chat()}, "has no chat template. Use a prompt column of plain text"),
    ],
)
def test_a_row_of_another_shape_names_row_and_column(tmp_path, changes, words):
    with pytest.raises(HybridFlowError, match=r"data\.train_files: .*row 0") as caught:
        judge(f"data.train_files={write(tmp_path, [row(**changes)] * 64)}")
    assert words in str(caught.value)


SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info{}):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def compute_scores():\n    pass\n", "Did you mean compute_scores?"),
        ("def compute_score(:\n", "line 1"),
        ("", "defines nothing"),
        ("compute_score = 3\n", "is 3, which cannot be called"),
        ("def compute_score(completions, **kwargs):\n    pass\n", "takes (completions, **kwargs) and is called with"),
        ("def compute_score(solution, truth):\n    pass\n", "Give it these arguments: data_source, solution_str"),
        ("def compute_score(data_source, solution_str, ground_truth):\n    pass\n", "extra_info="),
        ("import no_package_of_mine\n" + SCORE.format(""), "imports no_package_of_mine, which cannot be found"),
        (SCORE.format(", weight"), "takes (data_source, solution_str, ground_truth, extra_info, weight)"),
        ("def compute_score():\n    \0\n", "null bytes"),
    ],
)
def test_a_reward_file_without_a_function_that_can_be_called_is_an_error(tmp_path, code, words):
    file = tmp_path / "reward.py"
    file.write_text(code, encoding="latin-1")
    with pytest.raises(HybridFlowError, match=r"reward\.custom_reward_function") as caught:
        judge(f"reward.custom_reward_function.path={file}")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "code",
    [
        "async def compute_score(**sample):\n    pass\n",
        "from neighbour import f as compute_score\n",
        "from neighbour import *\n",
        "compute_score = len\n",
        "try:\n    from x import compute_score\nexcept ImportError:\n    compute_score = None\n",
        "@wrapped\ndef compute_score(a):\n    pass\n",
        SCORE.format("=None, weight=1"),
    ],
)
def test_a_reward_function_may_be_async_imported_or_assigned(tmp_path, code):
    (tmp_path / "neighbour.py").write_text("")
    file = tmp_path / "reward.py"
    file.write_text(code)
    judge(f"reward.custom_reward_function.path={file}")


def test_arguments_of_the_configuration_count_for_a_reward_function(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(SCORE.format(", weight"))
    judge(f"reward.custom_reward_function.path={file}", "reward.custom_reward_function.reward_kwargs.weight=2")
    with pytest.raises(HybridFlowError, match=r"called with .*scale="):
        judge(f"reward.custom_reward_function.path={file}", "reward.custom_reward_function.reward_kwargs.scale=2")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "class Rows:\n    def __init__(self, data_files, tokenizer, config):\n        pass\n",
            "is called with (source,",
        ),
        ("def rows(source):\n    yield {}\n", "config, held_out"),
    ],
)
def test_a_reader_of_prompts_with_another_signature_is_an_error(tmp_path, code, words):
    file = tmp_path / "reader.py"
    file.write_text(code)
    name = "Rows" if "class" in code else "rows"
    with pytest.raises(HybridFlowError, match=r"data\.custom_cls") as caught:
        judge(f"data.custom_cls.path={file}", f"data.custom_cls.name={name}")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "code", "words"),
    [
        ("algorithm.adv_estimator", "def own(token_level_rewards, response_mask, config): ...", "**columns"),
        ("algorithm.adv_estimator", "def own(*, token_level_rewards, mask, **rest): ...", "token_level_rewards"),
        ("algorithm.adv_estimator", "def own(*, token_rewards, mask, group_id, config): ...", "**columns"),
        (f"{ACTOR}.policy_loss.loss_mode", "def own(old_log_prob, log_prob, advantages, **more): ...", "log_probs="),
        (f"{ACTOR}.policy_loss.loss_mode", "own = 3", "cannot be called"),
    ],
)
def test_an_estimator_or_a_loss_with_another_signature_is_an_error_before_the_run(
    tmp_path, monkeypatch, key, code, words
):
    (tmp_path / "own_functions_1.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HybridFlowError) as caught:
        judge(f"{key}=own_functions_1:own")
    assert key in str(caught.value) and words in str(caught.value) and "Define it as own(*, " in str(caught.value)


def test_an_estimator_or_a_loss_may_name_columns_and_leave_the_rest(tmp_path, monkeypatch):
    (tmp_path / "own_functions_2.py").write_text(
        "def credit(*, token_rewards, mask, group_id, config, values, scale=2.0, **columns): ...\n"
        "def loss(log_probs, old_log_probs, advantages, mask, config, **columns): ...\n"
        "def anything(**columns): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("credit", "anything"):
        judge(f"algorithm.adv_estimator=own_functions_2:{name}")
    for name in ("loss", "anything"):
        judge(f"{ACTOR}.policy_loss.loss_mode=own_functions_2.{name}")


def test_a_reader_of_prompts_may_be_a_function_or_a_class(tmp_path):
    file = tmp_path / "reader.py"
    file.write_text(
        "def rows(source, *, config, held_out):\n    yield {}\n"
        "class Rows:\n    def __init__(self, source, **settings):\n        pass\n"
    )
    for name in ("rows", "Rows"):
        judge(f"data.custom_cls.path={file}", f"data.custom_cls.name={name}")


def model(folder: Path, **changes: object) -> Path:
    """The embedded model's folder with other fields in its config.json (None: without it)."""
    ensure_builtin_model(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(HybridFlowError, match=r"actor_rollout_ref\.model\.path") as caught:
        judge(f"actor_rollout_ref.model.path={folder}")
    return str(caught.value)


def test_a_whole_model_folder_is_let_through_and_so_is_one_that_brings_its_code(tmp_path):
    judge(f"actor_rollout_ref.model.path={model(tmp_path)}")
    judge(f"actor_rollout_ref.model.path={model(tmp_path, model_type='mine', auto_map={'AutoModel': 'm.M'})}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "quen2"}, "has no decoder of the model type quen2. Did you mean qwen2?"),
        ({"model_type": "clip"}, "has no decoder of the model type clip"),
        ({"model_type": None}, "names no model_type"),
        ({"num_attention_heads": "four"}, "does not describe a decoder"),
        ({"hidden_size": None}, "does not describe a decoder: KeyError 'hidden_size'"),
    ],
)
def test_a_model_that_is_no_decoder_is_an_error(tmp_path, changes, words):
    assert words in refusal(model(tmp_path, **changes))


def test_damaged_weights_are_an_error_that_says_how(tmp_path):
    weights = model(tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    for content, words in (
        (whole[:-1], f"has {len(whole) - 1:,} bytes, and its header says {len(whole):,}: it was cut short"),
        (whole[:200], "its header is cut short"),
        (b"", "its header is cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer"),
        ((16).to_bytes(8, "little") + b"x" * 16, "its header cannot be read"),
    ):
        weights.write_bytes(content)
        assert words in refusal(tmp_path)
    weights.unlink()
    assert "has no model.safetensors (nor an index of several)" in refusal(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(whole)
    assert "lacks 1 of 2 files of weights that its index names, model-2.safetensors" in refusal(tmp_path)


def test_a_model_without_tokenizer_or_with_a_broken_one_is_an_error(tmp_path):
    (model(tmp_path) / "tokenizer.json").write_text("{")
    assert "tokenizer.json is not valid json" in refusal(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert "has no tokenizer (no tokenizer.json)" in refusal(tmp_path)
    judge(f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.model.tokenizer_path=builtin:arithmetic")


@pytest.mark.parametrize(("endpoint", "level"), [("http://127.0.0.1:9", "error"), (None, "warning")])
def test_a_hub_that_does_not_answer_is_an_error_before_the_run(monkeypatch, endpoint, level):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    hub_answers.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", endpoint or f"http://127.0.0.1:{hub.getsockname()[1]}")
        config = load_config(tree("actor_rollout_ref.model.path=org/nothing-here"))
        found = check_machine(config, plan_run(config, LAPTOP), LAPTOP)
    assert [f.level for f in found if f.what == "actor_rollout_ref.model.path"] == [level]
    hub_answers.cache_clear()


def test_a_file_in_place_of_the_model_s_folder_is_an_error(tmp_path):
    assert f"Give the folder: {tmp_path}" in refusal(model(tmp_path) / "config.json")


def test_a_folder_that_is_no_model_is_an_error(tmp_path):
    with pytest.raises(HybridFlowError, match=r"actor_rollout_ref\.model\.path.*no config\.json"):
        judge(f"actor_rollout_ref.model.path={tmp_path}")


def test_a_folder_that_is_no_checkpoint_is_an_error_that_names_those_in_it(tmp_path):
    asked = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}"]
    with pytest.raises(HybridFlowError, match=r"trainer\.resume_from_path: .*no manifest\.json\. Name a global_step_N"):
        judge(*asked)
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "global_step_3" / "manifest.json").write_text("{}")
    with pytest.raises(HybridFlowError, match=r"Name one of the checkpoints in it: .*global_step_3\."):
        judge(*asked)
    judge("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_3")


def test_a_folder_without_adapter_is_an_error(tmp_path):
    with pytest.raises(HybridFlowError, match=r"lora_adapter_path: .* holds no adapter_model\.safetensors"):
        judge(f"actor_rollout_ref.model.lora_adapter_path={tmp_path}", "actor_rollout_ref.model.lora_rank=4")


def test_an_output_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(HybridFlowError, match=r"trainer\.default_local_dir"):
        judge(f"trainer.default_local_dir={tmp_path}/taken/run")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["algorithm.adv_estimator=grppo"],
            2,
            ["algorithm.adv_estimator", "Did you mean grpo?", "reinforce_plus_plus"],
        ),
        (["data.train_batchsize=3", f"+{ROLLOUT}.n=1"], 2, ["data.train_batch_size", f"{ROLLOUT}.n"]),
        ([f"{POLICY}.model.path=/nowhere/model"], 3, [f"{POLICY}.model.path", "/nowhere/model does not exist"]),
    ],
)
def test_the_real_command_refuses_bad_input_quickly_and_starts_nothing(tmp_path, arguments, code, words):
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow.main_ppo", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
    )
    took = time.monotonic() - started
    assert done.returncode == code, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert took < 15
    assert list(tmp_path.iterdir()) == []  # no outputs, no logs


@pytest.mark.parametrize(("shape", "words"), [(None, "has no score.weight"), ((2, 8), "has 2 outputs")])
def test_a_folder_that_is_no_reward_model_is_told(tmp_path, shape, words):
    head = {} if shape is None else {"score.weight": torch.zeros(shape)}
    save_file({"model.norm.weight": torch.ones(8), **head}, tmp_path / "model.safetensors")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    with pytest.raises(HybridFlowError, match=words) as caught:
        judge("reward.reward_model.enable=True", f"reward.reward_model.model.path={tmp_path}")
    assert "reward.reward_model.model.path" in str(caught.value)
