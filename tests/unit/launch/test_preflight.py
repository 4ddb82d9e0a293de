from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hybridflow.batch.columns import TABLE
from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig
from hybridflow.dispatch.register import registrations
from hybridflow.launch.machine import Gpu, Machine
from hybridflow.launch.plan import MemoryLine, RunPlan
from hybridflow.launch.preflight import HOST_POOL, plan_run
from hybridflow.launch.specs import WORKERS
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.optional import load
from tests.unit.config.trees import tree

LAPTOP = Machine(cores=8, memory_bytes=16 << 30, available_bytes=12 << 30, torch_build="2.13.0+cpu")
SERVER = Machine(
    cores=64, memory_bytes=1 << 40, available_bytes=1 << 40, gpus=(Gpu("H100", 80 << 30),) * 8, torch_build="2.9.0"
)
POLICY = "actor_rollout_ref"


def plan(*overrides: str, machine: Machine = LAPTOP) -> RunPlan:
    return plan_run(load_config(tree(*overrides)), machine)


def test_units_of_every_batch_size():
    found = plan(
        "data.train_batch_size=32",
        f"{POLICY}.rollout.n=4",
        f"{POLICY}.actor.ppo_mini_batch_size=8",
        f"{POLICY}.actor.ppo_epochs=2",
        "trainer.n_gpus_per_node=4",
    ).batch
    assert (found.prompts, found.samples_per_prompt, found.sequences) == (32, 4, 128)
    update = found.update("actor")
    assert (update.mini_batch_prompts, update.mini_batch_sequences, update.mini_batches) == (8, 32, 4)
    assert update.optimizer_steps == 8
    assert found.micro_batches("actor", "compute_log_prob").rows_per_coordinate == 128 // 4
    assert found.micro_batches("actor", "update_actor").rows_per_coordinate == 32 // 4


def test_actor_and_critic_count_mini_batches_in_the_same_unit():
    # verl once scaled the actor's mini-batch by n and not the critic's (known fault A14): 4 prompts, n=3, mini-batch 2.
    found = plan(
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=4",
        f"{POLICY}.rollout.n=3",
        f"{POLICY}.actor.ppo_mini_batch_size=2",
        "critic.ppo_mini_batch_size=2",
    ).batch
    assert found.update("actor").optimizer_steps == found.update("critic").optimizer_steps == 2


def test_the_critic_follows_the_actor_where_it_says_nothing():
    found = plan(
        "algorithm.adv_estimator=gae", f"{POLICY}.actor.ppo_mini_batch_size=16", f"{POLICY}.actor.ppo_epochs=3"
    ).batch
    assert found.update("critic").mini_batch_prompts == 16
    assert found.update("critic").epochs == 3


def test_micro_batches_are_cut_by_tokens_or_by_rows_never_both():
    by_tokens = plan(f"{POLICY}.actor.ppo_max_token_len_per_gpu=100").batch.micro_batches("actor", "update_actor")
    assert (by_tokens.max_tokens, by_tokens.max_rows) == (100, None)
    by_rows = plan(f"{POLICY}.actor.ppo_micro_batch_size_per_gpu=4").batch.micro_batches("actor", "update_actor")
    assert (by_rows.max_tokens, by_rows.max_rows) == (None, 4)
    asked = plan(f"{POLICY}.actor.ppo_micro_batch_size_per_gpu=4", f"{POLICY}.actor.use_dynamic_bsz=true").batch
    assert asked.micro_batches("actor", "update_actor").max_rows is None


def test_a_forward_micro_batch_larger_than_the_rank_is_the_rank():
    two_updates = f"{POLICY}.actor.ppo_mini_batch_size=32"  # one update alone needs no old log-probs
    found = plan(f"{POLICY}.rollout.log_prob_micro_batch_size_per_gpu=100000", two_updates).batch
    assert found.micro_batches("actor", "compute_log_prob").max_rows == 512


def test_steps_follow_from_the_rows_where_files_decide():
    found = plan("data.train_files=x.parquet", "trainer.total_epochs=3").batch
    assert found.total_steps is None
    assert found.steps(200) == 200 // 64 * 3
    assert plan("trainer.total_training_steps=5").batch.steps(200) == 5


def test_layouts_of_training_and_generation():
    found = plan(
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        f"{POLICY}.rollout.tensor_model_parallel_size=2",
        f"{POLICY}.actor.fsdp_config.fsdp_size=4",
    )
    assert found.role("actor").dims == ParallelDims(dp_replicate=2, dp_shard=4)
    assert found.role("rollout").dims == ParallelDims(dp_shard=4, tp=2)
    assert found.pool("main").pool.slots == (4, 4)


def test_roles_play_only_where_the_dataflow_needs_them():
    def roles(*overrides: str) -> list[str]:
        return [role.role for role in plan(*overrides).roles]

    assert roles() == ["actor", "rollout", "reward"]
    assert roles("algorithm.adv_estimator=gae") == ["actor", "rollout", "critic", "reward"]
    safe = "algorithm.safe_rlhf.enable=true"
    assert roles(safe) == ["actor", "rollout", "reward"]
    assert roles(safe, "algorithm.adv_estimator=gae") == ["actor", "rollout", "critic", "cost_critic", "reward"]
    assert "reference" in roles("algorithm.use_kl_in_reward=true")
    assert "reference" in roles(f"{POLICY}.actor.use_kl_loss=true")


def test_a_pool_of_its_own_and_reward_functions_on_the_host_of_a_gpu_machine():
    found = plan(
        "algorithm.adv_estimator=gae", "trainer.pools.values.slots=2", "trainer.pools.values.roles=critic",
        "reward.num_workers=3", machine=SERVER,
    )  # fmt: skip
    assert found.role("critic").pool == "values"
    assert found.role("critic").dims.world == 2
    assert found.pool("values").pool.roles == ("critic",)
    assert found.pool("main").pool.roles == ("actor", "rollout")
    assert found.role("reward").pool == HOST_POOL
    assert found.role("reward").dims.dp == 3
    assert found.pool(HOST_POOL).device == "cpu"


def test_a_generator_on_its_own_devices_has_its_own_pool_and_layout():
    found = plan(
        "trainer.n_gpus_per_node=2", "trainer.pools.sampling.slots=[4]", "trainer.pools.sampling.roles=[rollout]",
        f"{POLICY}.rollout.tensor_model_parallel_size=2", machine=SERVER,
    )  # fmt: skip
    assert found.role("actor").pool == "main" and found.role("actor").dims == ParallelDims(dp_shard=2)
    assert found.role("rollout").pool == "sampling" and found.role("rollout").dims == ParallelDims(dp_shard=2, tp=2)
    assert found.pool("sampling").replicas == 2 and found.pool("main").replicas == 1
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in found.pool("sampling").environment
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in found.pool("main").environment
    assert any("devices of its own (pool sampling)" in note for note in found.notes)
    rollout = next(line for line in found.memory if line.role == "rollout")
    assert rollout.pool == "sampling" and "KV cache" in rollout.resident  # nobody else needs that memory


def test_a_generator_that_shares_its_pool_is_one_group():
    found = plan(
        "trainer.pools.beside.slots=[2]", "trainer.pools.beside.roles=[rollout,reference]",
        f"{POLICY}.actor.use_kl_loss=true", machine=SERVER,
    )  # fmt: skip
    assert found.role("rollout").dims.dp == 2 and found.pool("beside").replicas == 1


def test_the_cost_critic_is_a_second_critic_in_the_critics_pool():
    found = plan(
        "algorithm.adv_estimator=gae", "algorithm.safe_rlhf.enable=true", "trainer.pools.values.slots=2",
        "trainer.pools.values.roles=critic", machine=SERVER,
    )  # fmt: skip
    assert found.pool("values").pool.roles == ("critic", "cost_critic")
    assert found.role("cost_critic").dims == found.role("critic").dims
    one, two = (next(line for line in found.memory if line.role == role) for role in ("critic", "cost_critic"))
    assert one.resident == two.resident and one.peak == two.peak


def test_reward_functions_share_the_processes_of_a_cpu_run():
    assert plan().role("reward").pool == "main"


def test_the_memory_of_a_model_of_another_size_is_its_own(tmp_path):
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 16, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 8192, **sizes}))
    found = plan("reward.reward_model.enable=true", f"reward.reward_model.model.path={tmp_path}", machine=SERVER)
    held = {line.role: sum(line.resident.values()) for line in found.memory}
    assert held["reward_model"] > 100 * held["actor"]


def test_a_reward_model_lives_on_devices_and_functions_beside_them():
    found = plan("reward.reward_model.enable=true", "reward.reward_model.model.path=m", machine=SERVER)
    assert found.role("reward_model").pool == "main"
    assert found.role("reward").pool == HOST_POOL
    assert found.batch.micro_batches("reward_model", "compute_model_score").max_tokens == 32768


@pytest.mark.parametrize(
    ("asked", "machine", "device"),
    [("auto", LAPTOP, "cpu"), ("auto", SERVER, "cuda"), ("cpu", SERVER, "cpu"), ("cuda", LAPTOP, "cuda")],
)
def test_the_device_is_resolved_once(asked, machine, device):
    assert plan(f"trainer.device={asked}", machine=machine).device == device


def test_a_cpu_build_of_torch_keeps_auto_on_the_cpu_of_a_gpu_machine():
    machine = Machine(
        cores=8, memory_bytes=1 << 34, available_bytes=1 << 34, gpus=(Gpu("A100", 40 << 30),), torch_build="2.13.0+cpu"
    )
    assert plan(machine=machine).device == "cpu"


@pytest.mark.parametrize(("slots", "threads"), [(1, 8), (3, 2), (8, 1), (16, 1)])
def test_threads_share_the_cores(slots, threads):
    found = plan(
        f"trainer.n_gpus_per_node={slots}", "data.train_batch_size=96", f"{POLICY}.actor.ppo_mini_batch_size=96"
    )
    assert found.pool("main").threads == threads
    assert found.pool("main").environment["OMP_NUM_THREADS"] == str(threads)


def test_processes_that_host_the_generator_get_its_variables():
    main, host = plan().pool("main"), plan(machine=SERVER).pool(HOST_POOL)
    assert main.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" in main.unset
    assert not any(name.startswith("VLLM") for name in host.environment)
    assert not any(name.startswith("VLLM") for name in plan(f"{POLICY}.rollout.name=hf").pool("main").environment)


VARIANTS = [
    (),
    ("algorithm.adv_estimator=optimal_token_baseline",),
    ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"),
    (f"{POLICY}.actor.use_kl_loss=true",),
    ("algorithm.safe_rlhf.enable=true",),
    ("algorithm.safe_rlhf.enable=true", "algorithm.adv_estimator=gae"),
    (
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.loss_type=reinforce",
    ),
    ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full"),
    (f"{POLICY}.actor.use_kl_loss=true", f"{POLICY}.actor.kl_loss_type=full"),
    (f"{POLICY}.actor.use_kl_loss=true", f"{POLICY}.actor.kl_loss_type=full+"),
]


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
def test_every_column_of_the_dataflow_is_in_the_table_and_written_before_it_is_read(overrides):
    given = {name for name, column in TABLE.items() if column.writer in ("data", "trainer")}
    for stage in plan(*overrides).dataflow:
        assert set(stage.reads) | set(stage.writes) <= set(TABLE)
        assert set(stage.reads) <= given, f"{stage.method} reads what nobody wrote"
        given |= set(stage.writes)


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
def test_every_column_of_the_dataflow_travels_to_the_worker_that_reads_it(overrides):
    config = load_config(tree(*overrides))
    for stage in plan_run(config, LAPTOP).dataflow:
        if stage.role == "cost_critic":  # its handle renames columns
            continue
        travels = registrations(load(WORKERS[stage.role]))[stage.method].columns({"config": config})
        missing = set() if travels is None else set(stage.reads) - {"valid"} - {name.rstrip("?") for name in travels}
        assert not missing, stage.method


def test_the_exact_kl_spares_the_pass_for_the_reference_s_log_probs_and_still_holds_the_reference():
    for kind, called in (("full", False), ("full+", True), ("low_var_kl", True)):
        found = plan(f"{POLICY}.actor.use_kl_loss=true", f"{POLICY}.actor.kl_loss_type={kind}")
        assert ("compute_ref_log_prob" in [stage.method for stage in found.dataflow]) == called
        assert found.model is not None
        reference = next(line for line in found.memory if line.role == "reference")
        assert reference.resident["parameters"] == 4 * found.model.parameters


def line_of(found: RunPlan, role: str) -> MemoryLine:
    return next(line for line in found.memory if line.role == role)


def test_what_waits_in_host_memory_counts_in_calls_only():
    """On a GPU; on a CPU both are one memory, and nothing changes."""
    at = f"{POLICY}.actor.fsdp_config"
    waiting = (f"{at}.param_offload=true", f"{at}.optimizer_offload=true")
    kept, moved = line_of(plan(machine=SERVER), "actor"), plan(*waiting, machine=SERVER)
    assert not line_of(moved, "actor").resident
    for call, parts in line_of(moved, "actor").phases.items():
        assert parts == {**kept.resident, **kept.phases[call]}
    assert line_of(moved, "rollout").phases["publish"]["parameters"] == kept.resident["parameters"]
    on_host = line_of(plan(f"{at}.offload_policy=true", machine=SERVER), "actor")
    assert not on_host.resident
    assert not {"parameters", "optimizer"} & {name for parts in on_host.phases.values() for name in parts}
    assert on_host.phases["update_actor"]["gathered layers"] > 0
    assert line_of(plan(*waiting), "actor") == line_of(plan(), "actor")


def test_activations_that_wait_in_host_memory_leave_one_layer():
    offload = f"{POLICY}.model.enable_activation_offload=true"
    twice = f"{POLICY}.actor.ppo_epochs=2"
    plain, parked = (line_of(plan(twice, *more, machine=SERVER), "actor") for more in ((), (offload,)))
    assert plain.phases["compute_log_prob"] == parked.phases["compute_log_prob"]
    here, there = (sum(line.phases["update_actor"].values()) for line in (plain, parked))
    assert there < here
    assert line_of(plan(offload), "actor") == line_of(plan(), "actor")


def test_a_stage_keeps_activations_of_as_many_micro_batches_as_its_schedule_has_in_flight():
    """One or two of eight in 1F1B, all eight in GPipe; torch's also make room for what they receive."""
    at = f"{POLICY}.actor"
    cut = ("trainer.n_gpus_per_node=2", f"{at}.pipeline_parallel_size=2", f"{at}.ppo_micro_batch_size_per_gpu=64")
    ours, torch_s, gpipe = (
        line_of(plan(*cut, f"{at}.pipeline_schedule={name}"), "actor").phases["update_actor"]["activations"]
        for name in ("1f1b", "torch_1f1b", "torch_gpipe")
    )
    assert ours < torch_s < 1.3 * ours and 2 * ours < gpipe < 9 * ours


def test_a_shared_prompt_takes_its_activations_once():
    """Prompt 60, response 20, four samples, 320 tokens: four rows of 80, or two groups of 60 + 4 x 20."""
    sizes = ("data.max_prompt_length=60", "data.max_response_length=20", f"{POLICY}.rollout.n=4")
    cut = f"{POLICY}.actor.ppo_max_token_len_per_gpu=320"
    plain = line_of(plan(*sizes, cut), "actor").phases["update_actor"]["activations"]
    shared = line_of(plan(*sizes, cut, f"{POLICY}.actor.use_prefix_grouper=true"), "actor").phases["update_actor"]
    # 280 tokens in place of 320, and twice as many response tokens at the head; keys and values of 8 x 60 copied
    assert 0.8 * plain < shared["activations"] < 1.25 * plain
    whole = f"{POLICY}.actor.ppo_max_token_len_per_gpu=100000"
    plain = line_of(plan(*sizes, whole), "actor").phases["update_actor"]["activations"]
    shared = line_of(plan(*sizes, whole, f"{POLICY}.actor.use_prefix_grouper=true"), "actor").phases["update_actor"]
    assert shared["activations"] < 0.6 * plain


def test_the_generator_s_copy_of_the_base_is_counted_where_adapters_travel_alone():
    lora = (f"{POLICY}.model.lora_rank=4", f"{POLICY}.model.lora_alpha=8")
    merged, kept = (line_of(plan(*lora, *more), "rollout") for more in ((), (f"{POLICY}.model.lora_merge=false",)))
    assert "kept base" not in merged.resident
    assert 0.5 < kept.resident["kept base"] / kept.resident["generator weights"] < 1.2
    assert merged.phases["publish"]["merged weights"] > 0
    assert "merged weights" not in kept.phases["publish"]


def test_memory_counts_what_adamw_holds():
    found = plan(f"{POLICY}.actor.ppo_max_token_len_per_gpu=64")  # several micro-batches: gradients stay between them
    actor = next(line for line in found.memory if line.role == "actor")
    assert found.model is not None
    assert actor.resident == {"parameters": 4 * found.model.parameters, "optimizer": 8 * found.model.parameters}
    assert actor.phases["update_actor"]["gradients"] == 4 * found.model.parameters


def test_adapters_alone_have_gradients_and_moments_and_their_reference_holds_nothing():
    found = plan(
        f"{POLICY}.model.lora_rank=4",
        f"{POLICY}.actor.use_kl_loss=True",
        f"{POLICY}.actor.ppo_max_token_len_per_gpu=64",
    )
    actor, reference = (next(line for line in found.memory if line.role == role) for role in ("actor", "reference"))
    gradients = actor.phases["update_actor"]["gradients"]
    assert actor.resident["optimizer"] == 2 * gradients < actor.resident["parameters"]
    assert reference.resident == {} and reference.peak["activations"] > 0
    apart = plan(
        f"{POLICY}.model.lora_rank=4",
        f"{POLICY}.actor.use_kl_loss=True",
        f"{POLICY}.ref.zero_stage=0",
        "trainer.n_gpus_per_node=2",
    )
    reference = next(line for line in apart.memory if line.role == "reference")
    assert reference.resident["parameters"] > 0, "another layout than the actor's loads the base itself"


def test_sharding_divides_what_a_device_holds():
    def held(slots: int) -> int:
        return sum(plan(f"trainer.n_gpus_per_node={slots}").memory[0].resident.values())

    assert held(4) * 4 == held(1)


def test_roles_of_a_pool_add_what_they_hold_and_take_turns_in_calls():
    found = plan("algorithm.adv_estimator=gae")
    held = sum(sum(line.resident.values()) for line in found.memory)
    assert found.memory_per_device("main") == held + max(sum(line.peak.values()) for line in found.memory)


def test_a_gpu_cache_takes_the_configured_share():
    found = plan(f"{POLICY}.rollout.gpu_memory_utilization=0.5", machine=SERVER)
    rollout = next(line for line in found.memory if line.role == "rollout")
    assert rollout.peak["KV cache"] + rollout.resident["generator weights"] == 40 << 30


def test_ppo_with_many_samples_is_pointed_out():
    assert any("rollout.n=8" in note for note in plan("algorithm.adv_estimator=gae").notes)
    assert plan("algorithm.adv_estimator=gae", f"{POLICY}.rollout.n=1").notes == ()


def test_an_asynchronous_rollout_is_told_what_it_gets():
    assert any("mode=async is the same loop as sync" in note for note in plan(f"{POLICY}.rollout.mode=async").notes)
    assert plan(f"{POLICY}.rollout.mode=sync").notes == ()


def test_checkpoints_that_this_configuration_could_not_resume_from_are_pointed_out():
    lacks = f"{POLICY}.actor.checkpoint.save_contents=[model,extra]"
    notes = plan(lacks, "trainer.save_freq=5").notes
    assert any("lacks optimizer" in note and "load_contents=[model,extra]" in note for note in notes)
    assert plan(lacks, "trainer.save_freq=5", f"{POLICY}.actor.checkpoint.load_contents=[model,extra]").notes == ()
    assert plan(lacks, "trainer.save_freq=-1").notes == ()
    critic = ("critic.checkpoint.save_contents=[model]", "trainer.save_freq=5")
    assert plan(*critic).notes == ()
    with_critic = plan(*critic, "algorithm.adv_estimator=gae", f"{POLICY}.rollout.n=1").notes
    assert any(note.startswith("critic.checkpoint") for note in with_critic)


def test_planning_and_judging_import_no_torch():
    code = (
        "import sys\n"
        "from hybridflow.config.root import PPOConfig\n"
        "from hybridflow.launch.preflight import check_machine, plan_run\n"
        "config = PPOConfig(); check_machine(config, plan_run(config))\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'tensordict', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_plan_of_the_defaults_needs_no_machine():
    assert plan_run(PPOConfig()).batch.sequences == 512
