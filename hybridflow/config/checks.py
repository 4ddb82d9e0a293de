"""Faults that only show when two keys are read together; no file is touched and nothing is imported.

Each check names the keys it rests on, so that a slip in one of them is not reported twice. The most telling faults come
first: what the run is, then sizes, layouts, budgets, schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridflow.config.algorithm_checks import ACTOR, REF, correction, exact_kl, shaping
from hybridflow.config.data import BUILTIN_TASK
from hybridflow.config.engine_checks import engines, optimizers
from hybridflow.config.problems import Problem, show

if TYPE_CHECKING:
    from hybridflow.config.actor import ActorConfig, RefConfig
    from hybridflow.config.critic import CriticConfig
    from hybridflow.config.reward import RewardModelConfig
    from hybridflow.config.root import PPOConfig

VALUE_ESTIMATORS = frozenset({"gae"})
"""Estimators that need a critic."""
GROUP_ESTIMATORS = frozenset(
    {
        "grpo",
        "grpo_passk",
        "rloo",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "gdpo",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    }
)
"""Estimators whose baseline is the other samples of the same prompt: they learn nothing from ``rollout.n=1``."""
TOKEN_BASELINES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})
"""Estimators that weigh tokens by the old policy's whole distribution."""
REWARD_ONLY_ESTIMATORS = {
    "remax": "needs the score of a greedy response",
    "gdpo": "credits named components of the reward",
}
"""Estimators that cannot credit a cost, and why."""
PTX_SUFFIXES = (".txt", ".jsonl")
"""Files of text that PPO-ptx reads."""
ROLLOUT = "actor_rollout_ref.rollout"
RM = "reward.reward_model"


def across(config: PPOConfig) -> Iterator[Problem]:
    """Every fault that two or more keys make together."""
    yield from _credit(config)
    yield from _needs_of_algorithms(config)
    yield from exact_kl(config)
    yield from correction(config)
    yield from shaping(config)
    yield from _pools(config)
    yield from _reward_model(config)
    yield from _batch_sizes(config)
    yield from _layouts(config)
    yield from _pipeline_schedules(config)
    yield from _lengths(config)
    yield from _schedule(config)
    yield from engines(config)
    yield from optimizers(config)


def divisor_near(number: int, wanted: int) -> int:
    """The divisor of ``number`` nearest to ``wanted``; the smaller of two."""
    divisors = [d for low in range(1, math.isqrt(number) + 1) if number % low == 0 for d in (low, number // low)]
    return min(sorted(divisors), key=lambda divisor: abs(divisor - wanted))


def _credit(config: PPOConfig) -> Iterator[Problem]:
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    estimator = algorithm.adv_estimator
    by_estimator = ("algorithm.adv_estimator",)
    if estimator in GROUP_ESTIMATORS and rollout.n < 2:
        text = f"algorithm.adv_estimator={estimator} compares samples of one prompt and needs at least 2"
        fix = f"Set {ROLLOUT}.n=8, or an estimator without groups: gae, reinforce_plus_plus, remax."
        yield Problem(key=f"{ROLLOUT}.n", given=show(rollout.n), text=text, fix=fix, reads=by_estimator)
    if estimator == "grpo_passk" and algorithm.passk > rollout.n:
        text = f"k cannot exceed the {rollout.n} samples of {ROLLOUT}.n"
        reads, fix = (*by_estimator, f"{ROLLOUT}.n"), f"Use {rollout.n}."
        yield Problem(key="algorithm.passk", given=show(algorithm.passk), text=text, fix=fix, reads=reads)
    if estimator in VALUE_ESTIMATORS and config.critic.enable is False:
        text = f"algorithm.adv_estimator={estimator} needs values"
        fix = "Remove critic.enable, or use algorithm.adv_estimator=grpo."
        yield Problem(key="critic.enable", given="False", text=text, fix=fix, reads=by_estimator)
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        text = f"the KL to the reference would count twice, with {ACTOR}.use_kl_loss=True"
        fix = "Keep one of the two."
        yield Problem(
            key="algorithm.use_kl_in_reward", given="True", text=text, fix=fix, reads=(f"{ACTOR}.use_kl_loss",)
        )
    if estimator == "gdpo" and not algorithm.gdpo_reward_keys:
        fix = "Name the components that the reward function returns, for example [correct,format]."
        text = "is empty, and algorithm.adv_estimator=gdpo normalises each component by itself"
        yield Problem(key="algorithm.gdpo_reward_keys", given="[]", text=text, fix=fix, reads=by_estimator)
    weights, keys = algorithm.gdpo_reward_weights, algorithm.gdpo_reward_keys
    if weights and len(weights) != len(keys):
        text = f"has {len(weights)} weights for {len(keys)} algorithm.gdpo_reward_keys"
        key, reads = "algorithm.gdpo_reward_weights", ("algorithm.gdpo_reward_keys",)
        yield Problem(key=key, given=show(weights), text=text, fix="Give one each.", reads=reads)


def _needs_of_algorithms(config: PPOConfig) -> Iterator[Problem]:
    """What one choice of the algorithm needs of the others."""
    algorithm, policy = config.algorithm, config.actor_rollout_ref
    bypass_key = "algorithm.rollout_correction.bypass_mode"
    estimator, bypass = algorithm.adv_estimator, algorithm.rollout_correction.bypass_mode
    if estimator in TOKEN_BASELINES and bypass:
        text = f"{estimator} weighs tokens by the old policy's probabilities, which bypass_mode does not compute"
        reads = ("algorithm.adv_estimator",)
        yield Problem(key=bypass_key, given="True", text=text, fix="Set it to False.", reads=reads)
    if algorithm.filter_groups.enable and policy.rollout.n < 2:
        text = "drops groups whose samples score alike, and one sample per prompt has none to differ from"
        key, fix, reads = "algorithm.filter_groups.enable", f"Set {ROLLOUT}.n=8.", (f"{ROLLOUT}.n",)
        yield Problem(key=key, given="True", text=text, fix=fix, reads=reads)
    if algorithm.safe_rlhf.enable and estimator in REWARD_ONLY_ESTIMATORS:
        text = f"algorithm.adv_estimator={estimator} {REWARD_ONLY_ESTIMATORS[estimator]}, and a cost has none"
        fix = "Use algorithm.adv_estimator=gae or grpo."
        key, reads = "algorithm.safe_rlhf.enable", ("algorithm.adv_estimator",)
        yield Problem(key=key, given="True", text=text, fix=fix, reads=reads)
    if algorithm.ptx_coef > 0 and not algorithm.ptx_files:
        text, fix = "is empty, and algorithm.ptx_coef mixes in the loss on text", "Name .txt or .jsonl files."
        yield Problem(key="algorithm.ptx_files", given="[]", text=text, fix=fix, reads=("algorithm.ptx_coef",))
    if algorithm.ptx_files and algorithm.ptx_coef == 0:
        text, fix = "gives the loss on algorithm.ptx_files no weight", "Set a weight, for example 1.0, or no files."
        yield Problem(key="algorithm.ptx_coef", given="0", text=text, fix=fix, reads=("algorithm.ptx_files",))
    for source in algorithm.ptx_files:
        if not source.endswith(PTX_SUFFIXES):
            text, fix = "a file of text is expected", f"Use files that end in {' or '.join(PTX_SUFFIXES)}."
            yield Problem(key="algorithm.ptx_files", given=source, text=text, fix=fix)
    if algorithm.ptx_coef > 0 and policy.rollout.temperature != 1:
        text = "log-probs are tempered by it, and the loss on text is that of the model itself (temperature 1)"
        given, reads = show(policy.rollout.temperature), ("algorithm.ptx_coef",)
        yield Problem(
            key=f"{ROLLOUT}.temperature", given=given, text=text, fix="Use 1, or algorithm.ptx_coef=0.", reads=reads
        )


def _pools(config: PPOConfig) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    playing = {"rollout": True, "critic": config.needs_critic, "reference": config.needs_reference, "reward": True}
    reads = ("algorithm.adv_estimator", "critic.enable", "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss")
    for name, pool in config.trainer.pools.items():
        key = f"trainer.pools.{name}.roles"
        if name == "main":
            text = "main is the pool of trainer.nnodes x trainer.n_gpus_per_node"
            yield Problem(key=f"trainer.pools.{name}", text=text, fix="Give the pool another name.")
        if not pool.roles:
            text = "hosts nobody: its slots would stand idle"
            yield Problem(key=key, given="[]", text=text, fix="Name roles of: rollout, critic, reference, reward.")
        for role in pool.roles:
            if role in seen:
                text = f"{role} already lives in trainer.pools.{seen[role]}"
                yield Problem(key=key, given=show(pool.roles), text=text, fix="Name every role once.")
            elif not playing[role]:
                text = f"this dataflow has no {role}: its slots would stand idle"
                yield Problem(key=key, given=show(pool.roles), text=text, fix="Remove the pool.", reads=reads)
            seen.setdefault(role, name)
    yield from _generator_apart(config)


def _reward_model(config: PPOConfig) -> Iterator[Problem]:
    scorer = config.reward.reward_model
    if scorer.enable and scorer.model.path == BUILTIN_TASK:
        key, reads = f"{RM}.model.path", (f"{RM}.enable",)
        text, fix = "is the default job's policy, which scores nothing", "Give the folder of a sequence classifier."
        yield Problem(key=key, given=scorer.model.path, text=text, fix=fix, reads=reads)
    if scorer.enable and scorer.model.lora_rank > 0:
        text = "a reward model is not trained: it has no adapters of its own"
        given = show(scorer.model.lora_rank)
        yield Problem(key=f"{RM}.model.lora_rank", given=given, text=text, fix="Merge them into its folder first.")


def _generator_apart(config: PPOConfig) -> Iterator[Problem]:
    """What a generator on devices of its own needs."""
    if config.rollout_shares_devices and not config.actor_rollout_ref.hybrid_engine:
        text = "means a generator on its own devices, and no pool hosts it"
        fix = "Set trainer.pools.rollout.slots=[N] and trainer.pools.rollout.roles=[rollout]."
        key, reads = "actor_rollout_ref.hybrid_engine", ("trainer.pools",)
        yield Problem(key=key, given="False", text=text, fix=fix, reads=reads)


def _batch_sizes(config: PPOConfig) -> Iterator[Problem]:
    data, filtering = config.data, config.algorithm.filter_groups
    actor, critic = config.actor_rollout_ref.actor, config.critic
    yield from _mini_batch(config, ACTOR, "actor", actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu)
    if config.needs_critic:
        mini = f"{ACTOR}.ppo_mini_batch_size" if critic.ppo_mini_batch_size is None else None
        size, micro = config.critic_mini_batch_size, critic.ppo_micro_batch_size_per_gpu
        yield from _mini_batch(config, "critic", "critic", size, micro, mini_key=mini)
    if data.gen_batch_size is not None and not filtering.enable and data.gen_batch_size != data.train_batch_size:
        text = "is the size of a round of dynamic sampling, and algorithm.filter_groups.enable=False"
        fix = "Remove it, or set algorithm.filter_groups.enable=True."
        reads = ("algorithm.filter_groups.enable", "data.train_batch_size")
        yield Problem(key="data.gen_batch_size", given=show(data.gen_batch_size), text=text, fix=fix, reads=reads)
    for kind, files, rows in (
        ("train", data.train_files, data.generated_size),
        ("val", data.val_files, data.generated_val_size),
    ):
        limit = data.train_max_samples if kind == "train" else data.val_max_samples
        rows = min(rows * len(files), limit) if limit > 0 else rows * len(files)
        generated = bool(files) and all(is_generated(file) for file in files)
        if kind == "train" and generated and rows < data.train_batch_size:
            text = f"one step takes data.train_batch_size={data.train_batch_size} prompts, and {rows} are generated"
            fix = f"Set data.generated_size={data.train_batch_size} or more."
            reads = ("data.train_batch_size", "data.train_files", "data.train_max_samples")
            key = "data.generated_size" if limit < 0 or limit > rows else "data.train_max_samples"
            yield Problem(key=key, given=show(rows), text=text, fix=fix, reads=reads)
        if not files:
            text = "is empty"
            yield Problem(key=f"data.{kind}_files", given="[]", text=text, fix="Name a file or builtin:arithmetic.")


def is_generated(source: str) -> bool:
    """Whether a data source is drawn and not read: ``builtin:arithmetic``, ``reasoning_gym:<task>``."""
    return source.startswith(("builtin:", "reasoning_gym:"))


def _mini_batch(
    config: PPOConfig, at: str, role: str, mini: int, micro: int | None, mini_key: str | None = None
) -> Iterator[Problem]:
    batch, samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    key = mini_key or f"{at}.ppo_mini_batch_size"
    sizes = (key, "data.train_batch_size")
    if mini > batch:
        if mini_key is None:  # else the actor's own check has said it
            text = f"prompts per optimizer step exceed the data.train_batch_size={batch} prompts of a trainer step"
            yield Problem(key=key, given=show(mini), text=text, fix=f"Use {batch} or a divisor of it.", reads=sizes)
        return
    if batch % mini:
        if mini_key is None:
            text = f"does not divide data.train_batch_size={batch}"
            yield Problem(key=key, given=show(mini), text=text, fix=f"Use {divisor_near(batch, mini)}.", reads=sizes)
        return
    replica = _replica(config, role)
    world = config.world_of(role)
    if world % replica:
        return  # the layout check says it
    dp = world // replica
    reads = (*sizes, f"{ROLLOUT}.n", *_device_keys(config, role), *_degree_keys(at))
    rows = mini * samples
    if rows % dp:
        text = f"{mini} prompts x {samples} samples = {rows} sequences do not divide over {dp} data-parallel ranks"
        steps = [s for s in range(mini, batch + 1) if batch % s == 0 and s * samples % dp == 0]
        fix = f"Use {steps[0]}." if steps else f"Choose sizes whose product with {ROLLOUT}.n is a multiple of {dp}."
        yield Problem(key=key, given=show(mini), text=text, fix=fix, reads=reads)
        return
    if micro is None or _dynamic(config, role):
        return
    key, per_rank = f"{at}.ppo_micro_batch_size_per_gpu", rows // dp
    if micro > per_rank:
        text = f"exceeds the {per_rank} sequences of a mini-batch on one rank ({mini} x {samples} / {dp})"
        yield Problem(key=key, given=show(micro), text=text, fix=f"Use {per_rank} or a divisor of it.", reads=reads)
    elif per_rank % micro:
        text = f"does not divide the {per_rank} sequences of a mini-batch on one rank ({mini} x {samples} / {dp})"
        yield Problem(key=key, given=show(micro), text=text, fix=f"Use {divisor_near(per_rank, micro)}.", reads=reads)


def _dynamic(config: PPOConfig, role: str) -> bool:
    section = config.actor_rollout_ref.actor if role == "actor" else config.critic
    return section.use_dynamic_bsz is True


def _replica(config: PPOConfig, role: str) -> int:
    """Ranks that share one block of rows in training: pp x sp x tp."""
    section = _section(config, role)
    return section.pipeline_parallel_size * section.ulysses_sequence_parallel_size * section.tensor_parallel_size


def _section(config: PPOConfig, role: str) -> ActorConfig | RefConfig | CriticConfig | RewardModelConfig:
    policy = config.actor_rollout_ref
    return {
        "actor": policy.actor,
        "reference": policy.ref,
        "critic": config.critic,
        "reward_model": config.reward.reward_model,
    }[role]


def _degree_keys(at: str) -> tuple[str, ...]:
    return tuple(f"{at}.{name}_parallel_size" for name in ("pipeline", "ulysses_sequence", "tensor"))


def _device_keys(config: PPOConfig, role: str) -> tuple[str, ...]:
    pool = config.pool_of(role)
    return ("trainer.nnodes", "trainer.n_gpus_per_node") if pool == "main" else (f"trainer.pools.{pool}.slots",)


def _layouts(config: PPOConfig) -> Iterator[Problem]:
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    world, tp = config.world_of("rollout"), rollout.tensor_model_parallel_size
    devices = _device_keys(config, "rollout")
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    if world % tp:
        text = f"does not divide the number of devices, {world} ({' x '.join(devices)})"
        yield Problem(key=key, given=show(tp), text=text, fix=f"Use {divisor_near(world, tp)}.", reads=devices)
    elif rollout.data_parallel_size not in (1, world // tp):
        text = f"{world} devices with {key}={tp} make {world // tp} replicas"
        fix = "Remove the key: the number of replicas follows from the devices."
        given = show(rollout.data_parallel_size)
        yield Problem(key=f"{ROLLOUT}.data_parallel_size", given=given, text=text, fix=fix, reads=(key, *devices))
    if rollout.name == "hf" and tp > 1:
        text = f"{ROLLOUT}.name=hf generates on one device"
        yield Problem(key=key, given=show(tp), text=text, fix="Use 1, or name=vllm.", reads=(f"{ROLLOUT}.name",))
    if config.trainer.controller == "local" and config.trainer.nnodes > 1:
        text = "trainer.controller=local stays on this machine"
        fix = "Use trainer.controller=ray, or trainer.nnodes=1."
        given = show(config.trainer.nnodes)
        yield Problem(key="trainer.nnodes", given=given, text=text, fix=fix, reads=("trainer.controller",))
    roles = [("actor", ACTOR, policy.actor.fsdp_config, policy.actor.zero_stage, f"{ACTOR}.fsdp_config")]
    if config.needs_reference:
        roles.append(("reference", REF, policy.ref.fsdp_config, policy.ref.zero_stage, f"{REF}.fsdp_config"))
    if config.needs_critic:
        roles.append(("critic", "critic", config.critic.fsdp, config.critic.zero_stage, "critic.fsdp"))
    scorer = config.reward.reward_model
    if scorer.enable:
        roles.append(("reward_model", RM, scorer.fsdp_config, scorer.zero_stage, f"{RM}.fsdp_config"))
    for role, at, sharding, stage, sharding_at in roles:
        yield from _training_layout(config, role, at, sharding.fsdp_size, stage, sharding_at)


def _training_layout(
    config: PPOConfig, role: str, at: str, fsdp_size: int, stage: int | None, sharding_at: str
) -> Iterator[Problem]:
    world, replica = config.world_of(role), _replica(config, role)
    devices = _device_keys(config, role)
    if world % replica:
        names: dict[str, str] = dict(zip(("pp", "sp", "tp"), _degree_keys(at), strict=True))
        section = _section(config, role)
        degrees: dict[str, int] = {
            "pp": section.pipeline_parallel_size,
            "sp": section.ulysses_sequence_parallel_size,
            "tp": section.tensor_parallel_size,
        }
        largest = max(degrees, key=lambda name: degrees[name])
        axis = next((name for name, degree in degrees.items() if world % degree), largest)
        product = " x ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
        text = f"{product} does not divide the number of devices of the {role}, {world}"
        others = replica // degrees[axis]
        fix = f"Use {divisor_near(world // others, degrees[axis])}." if world % others == 0 else ""
        reads = (*devices, *_degree_keys(at))
        yield Problem(key=names[axis], given=show(degrees[axis]), text=text, fix=fix, reads=reads)
        return
    dp = world // replica
    key = f"{sharding_at}.fsdp_size"
    if 0 < fsdp_size < dp and dp % fsdp_size:
        text = f"does not divide the {dp} data-parallel ranks of the {role}"
        reads = (*devices, *_degree_keys(at))
        yield Problem(key=key, given=show(fsdp_size), text=text, fix=f"Use {divisor_near(dp, fsdp_size)}.", reads=reads)
    if stage == 0 and fsdp_size > 1:
        text, reads = f"shards, and {at}.zero_stage=0 does not", (f"{at}.zero_stage",)
        yield Problem(key=key, given=show(fsdp_size), text=text, fix="Keep one of the two.", reads=reads)


def _pipeline_schedules(config: PPOConfig) -> Iterator[Problem]:
    trained = [(ACTOR, config.actor_rollout_ref.actor), *([("critic", config.critic)] if config.needs_critic else [])]
    for at, section in trained:
        given, stages = section.pipeline_schedule, f"{at}.pipeline_parallel_size"
        if given != "1f1b" and section.pipeline_parallel_size == 1:
            text = f"orders micro-batches over pipeline stages, and {stages}=1 makes a single one"
            fix = f"Set {stages}=2, or remove the key."
            yield Problem(key=f"{at}.pipeline_schedule", given=given, text=text, fix=fix, reads=(stages,))


def _lengths(config: PPOConfig) -> Iterator[Problem]:
    data, policy, rollout = config.data, config.actor_rollout_ref, config.actor_rollout_ref.rollout
    for name, given, own in (
        ("prompt_length", rollout.prompt_length, data.max_prompt_length),
        ("response_length", rollout.response_length, data.max_response_length),
    ):
        if given is not None and given != own:
            text = f"must equal data.max_{name}={own}: both cut the same rows"
            reads = (f"data.max_{name}",)
            yield Problem(key=f"{ROLLOUT}.{name}", given=show(given), text=text, fix="Set one of them.", reads=reads)
    longest = config.prompt_length + config.response_length
    lengths = ("data.max_prompt_length", "data.max_response_length")
    sum_text = f"{config.prompt_length} prompt + {config.response_length} response tokens = {longest}"
    if config.model_length < longest:
        key = f"{ROLLOUT}.max_model_len"
        yield Problem(
            key=key, given=show(config.model_length), text=f"is below {sum_text}", fix=f"Use {longest}.", reads=lengths
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < config.model_length:
        key = f"{ROLLOUT}.max_num_batched_tokens"
        text = f"must hold a whole sequence ({config.model_length} tokens) while enable_chunked_prefill=False"
        fix = f"Use {config.model_length} or more."
        reads = (*lengths, f"{ROLLOUT}.max_model_len", f"{ROLLOUT}.enable_chunked_prefill")
        yield Problem(key=key, given=show(rollout.max_num_batched_tokens), text=text, fix=fix, reads=reads)
    actor, ref, critic, scorer = policy.actor, policy.ref, config.critic, config.reward.reward_model
    sp_actor, sp_ref, sp_critic = (s.ulysses_sequence_parallel_size for s in (actor, ref, critic))
    budgets = [
        (ACTOR, "ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu, sp_actor, actor.use_dynamic_bsz,
         actor.ppo_micro_batch_size_per_gpu, True),
        (ROLLOUT, "log_prob_max_token_len_per_gpu", rollout.log_prob_max_token_len_per_gpu, sp_actor,
         rollout.log_prob_use_dynamic_bsz, rollout.log_prob_micro_batch_size_per_gpu, True),
        (REF, "log_prob_max_token_len_per_gpu", ref.log_prob_max_token_len_per_gpu, sp_ref,
         ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size_per_gpu, config.needs_reference),
        ("critic", "ppo_max_token_len_per_gpu", critic.ppo_max_token_len_per_gpu, sp_critic, critic.use_dynamic_bsz,
         critic.ppo_micro_batch_size_per_gpu, config.needs_critic),
        (RM, "max_token_len_per_gpu", scorer.max_token_len_per_gpu, scorer.ulysses_sequence_parallel_size, None,
         scorer.micro_batch_size_per_gpu, scorer.enable),
    ]  # fmt: skip
    for at, name, budget, sp, dynamic, rows, plays in budgets:
        if plays and dynamic is False and rows is None:
            prefix = name.replace("max_token_len", "micro_batch_size")
            flag = "use_dynamic_bsz" if name.startswith("ppo") else "log_prob_use_dynamic_bsz"
            fix = f"Set {at}.{prefix}=N, or remove the key."
            text = f"needs a number of sequences: {at}.{prefix} is not set"
            yield Problem(key=f"{at}.{flag}", given="False", text=text, fix=fix)
        by_tokens = dynamic if dynamic is not None else rows is None
        if plays and by_tokens and budget * sp < longest:
            spread = f" x {sp} sequence-parallel ranks" if sp > 1 else ""
            text = f"tokens per device{spread} cannot hold one sequence of {sum_text}"
            fix = f"Use {-(-longest // sp)} or more."
            yield Problem(key=f"{at}.{name}", given=show(budget), text=text, fix=fix, reads=lengths)


def _schedule(config: PPOConfig) -> Iterator[Problem]:
    data, trainer = config.data, config.trainer
    steps = planned_steps(config)
    reads = ("trainer.total_training_steps", "trainer.total_epochs", "data.train_batch_size", "data.generated_size")
    if steps is not None and trainer.critic_warmup >= steps and trainer.critic_warmup > 0:
        text = f"leaves no step for the actor: the run has {steps}"
        fix = f"Use less than {steps}."
        yield Problem(key="trainer.critic_warmup", given=show(trainer.critic_warmup), text=text, fix=fix, reads=reads)
    beyond = [step for step in config.profiler.steps if steps is not None and step > steps]
    if beyond:
        text = f"step {beyond[0]} lies behind the run's last: it has {steps}"
        yield Problem(
            key="profiler.steps", given=show(config.profiler.steps), text=text, fix=f"Use {steps} or less.", reads=reads
        )
    if trainer.critic_warmup and not config.needs_critic:
        text = "there is no critic to warm up"
        fix = "Use 0, or algorithm.adv_estimator=gae."
        given = show(trainer.critic_warmup)
        keys = ("algorithm.adv_estimator", "critic.enable")
        yield Problem(key="trainer.critic_warmup", given=given, text=text, fix=fix, reads=keys)
    rates = [(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim, config.actor_rollout_ref.actor.ppo_epochs,
                   config.actor_rollout_ref.actor.ppo_mini_batch_size)]  # fmt: skip
    if config.needs_critic:
        rates.append(("critic.optim", config.critic.optim, config.critic_epochs, config.critic_mini_batch_size))
    for at, optim, epochs, mini in rates:
        if steps is None:
            continue
        per_step = 1 if optim.schedule_unit == "trainer_step" else epochs * max(1, data.train_batch_size // mini)
        units = steps * per_step
        if optim.lr_warmup_steps >= units > 0 and optim.lr_warmup_steps > 0:
            text = f"the rate would never reach its peak: the schedule has {units} {optim.schedule_unit}s"
            fix = f"Use less than {units}, or {at}.lr_warmup_steps_ratio."
            key = f"{at}.lr_warmup_steps"
            yield Problem(key=key, given=show(optim.lr_warmup_steps), text=text, fix=fix, reads=reads)


def planned_steps(config: PPOConfig) -> int | None:
    """Trainer steps of the run, where the configuration alone decides them; None: the data files decide."""
    data, trainer = config.data, config.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    if not data.train_files or not all(is_generated(source) for source in data.train_files):
        return None
    rows = data.generated_size * len(data.train_files)
    rows = min(rows, data.train_max_samples) if data.train_max_samples > 0 else rows
    return rows // data.train_batch_size * trainer.total_epochs
