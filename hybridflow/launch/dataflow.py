"""One trainer step as a table: which role is called with which columns and what it adds."""

from __future__ import annotations

from hybridflow.config.checks import TOKEN_BASELINES
from hybridflow.config.root import PPOConfig
from hybridflow.launch.plan import Stage

PROMPT = ("prompt_ids", "prompt_length", "group_id", "sample_index")
SEQUENCE = ("prompt_ids", "prompt_length", "response_ids", "response_length", "response_mask")
ROLLOUT_WRITES = (
    "response_ids",
    "response_length",
    "response_mask",
    "rollout_log_probs",
    "weight_version",
    "finish_reason",
    "valid",
)
SQUARES = ("old_sum_pi_squared",)
SCORED = ("response_ids", "response_length", "valid", "data_source", "ground_truth", "extra_info")


def dataflow(config: PPOConfig) -> tuple[Stage, ...]:
    """The calls of one step in order; calls of one stage have no edge between them."""
    stages = [Stage(stage="generate", role="rollout", method="generate_sequences", reads=PROMPT, writes=ROLLOUT_WRITES)]
    scored = SCORED
    if config.reward.reward_model.enable:
        call, writes = "compute_model_score", ("model_score",)
        stages.append(Stage(stage="score", role="reward_model", method=call, reads=SEQUENCE, writes=writes))
        scored += writes
    writes = ("score", "reward_info", "valid", *_steps(config))
    stages.append(Stage(stage="score", role="reward", method="compute_reward", reads=scored, writes=writes))
    if config.recomputes_old_log_probs:
        writes = ("old_log_probs", "old_entropy", *(("full_kl",) if config.exact_kl_in_reward else ()))
        writes += SQUARES if config.algorithm.adv_estimator in TOKEN_BASELINES else ()
        stages.append(Stage(stage="score", role="actor", method="compute_log_prob", reads=SEQUENCE, writes=writes))
    if config.needs_ref_log_probs:
        call, writes = "compute_ref_log_prob", ("ref_log_probs",)
        stages.append(Stage(stage="score", role="reference", method=call, reads=SEQUENCE, writes=writes))
    if config.needs_critic:
        stages.append(Stage(stage="score", role="critic", method="compute_values", reads=SEQUENCE, writes=("values",)))
    if config.needs_cost_critic:
        call, writes = "compute_values", ("cost_values",)
        stages.append(Stage(stage="score", role="cost_critic", method=call, reads=SEQUENCE, writes=writes))
    return (*stages, *_credit(config), *_learn(config))


def _steps(config: PPOConfig) -> tuple[str, ...]:
    return ("token_scores",) if config.reward.step_rewards else ()


def _credit(config: PPOConfig) -> tuple[Stage, ...]:
    correction = config.algorithm.rollout_correction
    reads = ["score", "valid", "group_id", "response_mask"]
    reads += [*_steps(config), *(["values"] if config.needs_critic else [])]
    reads += ["old_log_probs", *SQUARES] if config.algorithm.adv_estimator in TOKEN_BASELINES else []
    if config.algorithm.use_kl_in_reward:
        reads += ["full_kl"] if config.exact_kl_in_reward else ["old_log_probs", "ref_log_probs"]
    reads += ["rollout_log_probs"] if correction.rollout_is or correction.rollout_rs else []
    writes = ["loss_mask", "token_rewards", "advantages", "returns"]
    writes += ["correction_weights"] if correction.rollout_is else []
    stage = Stage(
        stage="credit",
        role="actor",
        method="compute_advantage",
        reads=tuple(dict.fromkeys(reads)),
        writes=tuple(writes),
    )
    if not config.algorithm.safe_rlhf.enable:
        return (stage,)
    values = ("cost_values",) if config.needs_cost_critic else ()
    cost = Stage(
        stage="credit",
        role="actor",
        method="compute_cost_advantage",
        reads=("cost", "loss_mask", "advantages", "group_id", *values),
        writes=("advantages", *(("cost_returns",) if values else ())),
    )
    return stage, cost


def _learn(config: PPOConfig) -> tuple[Stage, ...]:
    correction = config.algorithm.rollout_correction
    old = "old_log_probs" if config.recomputes_old_log_probs else "rollout_log_probs"
    reads = [*SEQUENCE, old, "advantages", "loss_mask"]
    actor = config.actor_rollout_ref.actor
    reads += ["ref_log_probs"] if actor.use_kl_loss and actor.kl_loss_type != "full" else []
    reads += ["correction_weights"] if correction.rollout_is else []
    stages = []
    if config.needs_critic:
        columns = (*SEQUENCE, "values", "returns", "loss_mask")
        stages.append(Stage(stage="learn", role="critic", method="update_critic", reads=columns, writes=()))
    if config.needs_cost_critic:
        columns = (*SEQUENCE, "cost_values", "cost_returns", "loss_mask")
        stages.append(Stage(stage="learn", role="cost_critic", method="update_critic", reads=columns, writes=()))
    stages.append(Stage(stage="learn", role="actor", method="update_actor", reads=tuple(reads), writes=()))
    stages.append(Stage(stage="publish", role="weights", method="publish", reads=(), writes=()))
    return tuple(stages)
