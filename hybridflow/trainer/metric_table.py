"""The one table of metrics: every name that a run may write to ``metrics.jsonl``, its unit, meaning and writer.

``docs/reference/metrics.md`` is made from it, and a test runs jobs and looks every written name up. ``*`` in a name
stands for anything. Unless a line says otherwise a metric counts tokens where ``loss_mask`` is True (policy tokens of
valid rows that no bound rejected), weighs every token (or row) alike, and is the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDoc:
    """One line of the table."""

    name: str
    unit: str
    meaning: str
    source: str
    """File that computes it, under ``hybridflow/``."""


SPREAD = ("mean", "max", "min")


def _doc(source: str, name: str, unit: str, meaning: str) -> MetricDoc:
    return MetricDoc(name=name, unit=unit, meaning=meaning, source=source)


def _spread(source: str, name: str, unit: str, meaning: str) -> Iterator[MetricDoc]:
    """``name/mean``, ``/max`` and ``/min`` as one line each."""
    words = {"mean": "mean", "max": "largest", "min": "smallest"}
    for how in SPREAD:
        yield _doc(source, f"{name}/{how}", unit, f"{meaning}: {words[how]}")


def _section(source: str, *lines: tuple[str, str, str]) -> tuple[MetricDoc, ...]:
    return tuple(_doc(source, *line) for line in lines)


_RUN = _section(
    "trainer/run.py",
    ("step", "steps", "trainer step of the line; 0 is before the first one"),
    ("training/global_step", "steps", "the same"),
    ("training/epoch", "passes", "passes over the training prompts that are complete"),
    ("timing_s/step", "s", "the whole step, without validation and checkpoint"),
    ("timing_s/testing", "s", "validation"),
    ("timing_s/save_checkpoint", "s", "time that training waited for a checkpoint"),
    ("timing_s/gen", "s", "generation (slowest rank, as all calls below; without the time in the queue)"),
    ("timing_s/reward", "s", "scoring"),
    ("timing_s/old_log_prob", "s", "log-probs of the policy before its update"),
    ("timing_s/ref", "s", "log-probs of the reference"),
    ("timing_s/values", "s", "values of the critic"),
    ("timing_s/cost_values", "s", "values of the cost critic"),
    ("timing_s/adv", "s", "credit assignment"),
    ("timing_s/cost_adv", "s", "credit assignment of the cost"),
    ("timing_s/update_actor", "s", "all updates of the actor"),
    ("timing_s/update_critic", "s", "all updates of the critic"),
    ("timing_s/update_cost_critic", "s", "all updates of the cost critic"),
    ("timing_s/update_weights", "s", "weights from actor to generator"),
    ("checkpoint/failed_saves", "saves", "checkpoints that the disk refused so far"),
    ("perf/time_per_step", "s", "the same as timing_s/step"),
    ("perf/throughput", "tokens/s", "prompt and response tokens of the batch over the time of the step"),
    (
        "perf/straggler/*",
        "ratio",
        "the slowest rank's time over the median of the others, by method; ranks in a collective end alike",
    ),
    ("perf/driver_bytes", "bytes", "payload that went through the driver in this step"),
    ("perf/fetched_bytes", "bytes", "what ranks read of one another's objects in this step"),
    ("perf/over_fetch_bytes", "bytes", "of these, what lay beyond their own rows and columns"),
)
_BATCH = _section(
    "trainer/metrics.py",
    ("perf/total_num_tokens", "tokens", "prompt and response tokens of the batch, all rows"),
    ("perf/valid_share", "0..1", "rows that are neither failed nor aborted"),
)
_AGREEMENT = _section(
    "algorithms/agreement.py",
    ("training/rollout_log_prob_diff/max", "nats", "largest distance of sampler's and trainer's log-prob of a token"),
    ("training/rollout_log_prob_diff/mean", "nats", "mean distance of sampler's and trainer's log-prob of a token"),
    ("actor/entropy_old", "nats", "entropy per policy token before the update, tempered"),
)
_CREDIT = (
    *_spread("algorithms/credit.py", "critic/score", "score", "raw score of usable rows, as the reward function said"),
    *_spread(
        "algorithms/credit.py", "critic/rewards", "score", "shaped reward of a row, minus KL where it is in the reward"
    ),
    *_spread("algorithms/credit.py", "critic/advantages", "-", "advantage of a token"),
    *_spread("algorithms/credit.py", "critic/returns", "score", "return of a token"),
    *_spread("algorithms/credit.py", "critic/values", "score", "value of a token"),
    *_section(
        "algorithms/credit.py",
        (
            "critic/vf_explained_var",
            "up to 1",
            "share of the returns' variance that values explain; below 0: worse than none",
        ),
        ("batch/trained_tokens", "tokens", "tokens that are learned from"),
        (
            "groups/zero_spread_share",
            "0..1",
            "groups whose usable rows all have one score: nothing to learn by comparison",
        ),
        ("groups/singleton_share", "0..1", "groups with one usable row"),
        ("groups/empty", "groups", "groups without a usable row"),
        ("groups/invalid", "rows", "rows that are failed, aborted or without a finite score"),
        ("response_length/clip_ratio", "0..1", "usable rows whose response is as long as allowed"),
        ("response/aborted_ratio", "0..1", "rows whose generation was aborted"),
        ("reward/overlong_share", "0..1", "rows with a length penalty"),
        ("reward/running_mean", "score", "running mean that scores are normalised by"),
        ("reward/running_std", "score", "running standard deviation that scores are normalised by"),
        (
            "reward/*/mean",
            "score",
            "a number that the reward function returned beside score, or overlong_penalty: mean",
        ),
        ("reward/*/max", "score", "a component of algorithm.gdpo_reward_keys, or overlong_penalty: largest"),
        ("reward/*/min", "score", "the same: smallest"),
        ("actor/reward_kl_penalty", "nats", "KL to the reference per token, mean over tokens of a row, then over rows"),
        ("actor/reward_kl_penalty_coeff", "-", "coefficient of the KL in the reward in this step"),
    ),
    *_spread("algorithms/credit.py", "response_length", "tokens", "response of a usable row"),
    *_spread("algorithms/credit.py", "prompt_length", "tokens", "prompt of a usable row"),
)
_FAILURES = _section(
    "trainer/failures.py",
    ("failed/aborted", "rows", "generation was cut off from outside"),
    ("failed/empty", "rows", "the policy ended its response at once (not counted by reward.max_failed_share)"),
    ("failed/late", "rows", "the reward function gave no answer within reward.timeout_s"),
    ("failed/died", "rows", "the process of the reward function ended in the call"),
    ("failed/not_finite", "rows", "the score was NaN or infinite"),
    ("failed/lacks_component", "rows", "a component of reward.component_weights was missing or no number"),
    ("failed/*", "rows", "the reward function raised an exception of this class"),
)
_FILTER = _section(
    "trainer/dynamic_sampling.py",
    ("filter_groups/rounds", "rounds", "generation rounds of this step"),
    ("filter_groups/generated", "groups", "groups generated"),
    ("filter_groups/telling", "groups", "groups with different values of the metric"),
    ("filter_groups/telling_share", "0..1", "telling over generated"),
    ("filter_groups/skipped", "0 or 1", "whether the step was skipped for lack of telling groups"),
)
_CORRECTION = _section(
    "algorithms/correction.py",
    ("rollout_corr/kl", "nats", "KL(sampler || trainer before the update) per token, estimated by k1"),
    ("rollout_corr/k3_kl", "nats", "the same, estimated by k3"),
    ("rollout_corr/abs_log_ratio", "nats", "mean distance of the log-probs; what the guard compares"),
    ("rollout_corr/max_abs_log_ratio", "nats", "largest distance"),
    ("rollout_corr/chi2_token", "-", "mean squared ratio of a token, minus 1"),
    ("rollout_corr/chi2_seq", "-", "mean squared ratio of a row, minus 1"),
    ("rollout_corr/training_ppl", "-", "perplexity of a row under the trainer, mean over rows"),
    ("rollout_corr/rollout_ppl", "-", "perplexity of a row under the sampler, mean over rows"),
    (
        "rollout_corr/log_ppl_diff",
        "nats",
        "its logarithm: trainer's minus sampler's, mean over rows",
    ),
    ("rollout_corr/log_ppl_abs_diff", "nats", "its absolute value, mean over rows"),
    ("rollout_corr/guard_tripped", "0 or 1", "whether mismatch left the band"),
    ("rollout_corr/rollout_rs_masked_fraction", "0..1", "tokens that a bound or the veto rejected"),
    ("rollout_corr/rollout_rs_seq_masked_fraction", "0..1", "rows that were rejected as a whole"),
    ("rollout_corr/rollout_is_mean", "-", "truncated importance weight: mean"),
    ("rollout_corr/rollout_is_std", "-", "truncated importance weight: standard deviation"),
    ("rollout_corr/rollout_is_max", "-", "truncated importance weight: largest"),
    ("rollout_corr/rollout_is_min", "-", "truncated importance weight: smallest"),
    ("rollout_corr/rollout_is_ratio_fraction_high", "0..1", "tokens whose weight was truncated"),
    ("rollout_corr/rollout_is_eff_sample_size", "0..1", "effective sample size of the weights over their number"),
)
_ACTOR = (
    *_section(
        "algorithms/losses.py",
        ("actor/pg_loss", "-", "policy term of the loss, mean over the step's optimizer steps (as all of actor/*)"),
        ("actor/ppo_kl", "nats", "log-prob before the step minus log-prob now, per token"),
        ("actor/entropy", "nats", "entropy in the update, in the loss's aggregation (entropy_coeff > 0, or one pass)"),
        ("actor/kl_loss", "nats", "KL to the reference in the loss, in the loss's aggregation"),
    ),
    *_section(
        "algorithms/policy_loss.py",
        ("actor/pg_clipfrac", "0..1", "tokens at which the loss's clip, bound or trust region decides"),
        ("actor/pg_clipfrac_lower", "0..1", "tokens at which the dual clip decides"),
        ("actor/covariance_selected", "0..1", "tokens that clip_cov or kl_cov singles out"),
    ),
    _doc("algorithms/pretraining.py", "actor/ptx_loss", "nats", "PPO-ptx: negative log-prob per token of text"),
)
_CRITIC = _section(
    "algorithms/losses.py",
    ("critic/vf_loss", "-", "value loss, mean over the step's optimizer steps (as all below)"),
    ("critic/vf_clipfrac", "0..1", "tokens at which the clip of the value decides"),
    ("critic/vpred_mean", "score", "value during the update"),
)
_UPDATES = tuple(
    line
    for role in ("actor", "critic", "cost_critic")
    for line in _section(
        "workers/update.py",
        (f"{role}/loss", "-", "whole loss"),
        (f"{role}/grad_norm", "-", "global gradient norm before clipping"),
        (f"{role}/grad_skipped", "steps", "optimizer steps skipped: loss or gradient not finite, or no token"),
        (f"{role}/out_of_memory", "attempts", "updates done again with smaller micro-batches, for lack of memory"),
        (f"{role}/lr", "-", "learning rate of the last optimizer step"),
        (f"{role}/optimizer_steps", "steps", "optimizer steps of this trainer step, skipped ones included"),
    )
)
_WORK = (
    *(
        line
        for role, what in (
            ("actor", "in updates"),
            ("critic", "in updates"),
            ("cost_critic", "in updates"),
            ("reference", "in the forward"),
            ("reward_model", "in the forward"),
        )
        for line in _section(
            "workers/costs.py",
            (f"perf/mfu/{role}", "0..1", f"FLOPs of the model over what the devices could do in that time, {what}"),
            (f"perf/tokens_per_second_per_device/{role}", "tokens/s", f"tokens of rows, {what}"),
            (f"perf/padding_share/{role}", "0..1", f"computed tokens that belong to no row, {what}"),
            (f"perf/imbalance/{role}", "from 1", f"most loaded rank over the mean, by rounds of micro-batches, {what}"),
        )
    ),
    *_section(
        "trainer/costs.py",
        ("perf/mfu/rollout", "0..1", "FLOPs of the generator's matrices over what the devices could do in that time"),
        ("perf/tokens_per_second_per_device/rollout", "tokens/s", "tokens of responses"),
        ("perf/imbalance/rollout", "from 1", "generation time of the slowest rank over the mean"),
    ),
    *_section(
        "trainer/costs.py",
        ("perf/compute_s/*", "s", "time in calls of the role outside collectives, mean over its ranks"),
        ("perf/communication_s/*", "s", "time in collectives, the wait for slower ranks included, mean over ranks"),
        ("perf/idle_s/*", "s", "the rest of the step: other roles' turn, the driver, the queue"),
        (
            "perf/max_memory_gb/*",
            "10^9 bytes",
            "highest memory of a rank in a call: allocator (GPU), process (CPU)",
        ),
    ),
)
_SAFE = (
    *_spread("algorithms/lagrange.py", "safe_rlhf/cost", "cost", "cost of a row"),
    *_section(
        "algorithms/lagrange.py",
        ("safe_rlhf/multiplier", "-", "Lagrange multiplier used in this step"),
        ("safe_rlhf/cost_limit", "cost", "mean cost allowed"),
        ("safe_rlhf/over_limit_share", "0..1", "rows whose cost exceeds the limit"),
        ("safe_rlhf/cost_advantages/mean", "-", "advantage of the cost of a token"),
        ("cost_critic/vf_explained_var", "up to 1", "as critic/vf_explained_var, of the cost"),
        ("cost_critic/vf_loss", "-", "as critic/vf_loss, of the cost"),
        ("cost_critic/vf_clipfrac", "0..1", "as critic/vf_clipfrac, of the cost"),
        ("cost_critic/vpred_mean", "cost", "as critic/vpred_mean, of the cost"),
    ),
)
_PUBLISH = _section(
    "hybrid_engine/publish.py",
    (
        "rollout/replica_restarts",
        "restarts",
        "replicas of a generator in a pool of its own that were started again so far",
    ),
    ("publish/bytes", "bytes", "received over all ranks"),
    ("publish/sent_bytes", "bytes", "sent over all ranks"),
    ("publish/local_bytes", "bytes", "copied within a rank"),
    ("publish/bound_bytes", "bytes", "least that any plan between the two layouts must move"),
    ("publish/ratio_to_bound", "from 1", "received over bound; 1 where nothing has to move"),
    ("publish/ideal_bytes", "bytes", "received by the best assignment of slices to senders"),
    ("publish/peak_extra_bytes", "bytes", "transfer buffers of the worst rank"),
    ("publish/rounds", "rounds", "buckets one after another"),
    ("publish/messages", "messages", "messages of all ranks"),
    ("publish/retries", "tries", "tries that broke midway and were repeated"),
    ("publish/seconds", "s", "the whole transfer, all tries, worst rank"),
    ("publish/plan_seconds", "s", "until every rank has its plan"),
    ("publish/move_seconds", "s", "moving"),
    ("publish/verify_seconds", "s", "comparing checksums, where asked"),
    ("publish/merge_seconds", "s", "adding LoRA adapters to the generator's base (lora_merge=False)"),
    ("publish/pack_seconds", "s", "of moving: cast and pack"),
    ("publish/copy_seconds", "s", "of moving: blocks that stay on their rank"),
    ("publish/wait_seconds", "s", "of moving: for peers and the wire"),
    ("publish/write_seconds", "s", "of moving: into the generator's storage"),
    ("residency/*_seconds", "s", "a step between training and generation (wake, sleep, offload), summed over ranks"),
    ("residency/*_bytes", "bytes", "memory held after that step, summed over ranks"),
)
_VALIDATION = _section(
    "trainer/validate.py",
    ("val-core/*/reward/mean_at_*", "score", "mean score of a data source over n sampled responses per prompt"),
    ("val-core/*/reward/pass_at_*", "0..1", "chance that one of k samples has a score of 1 or more, unbiased"),
    ("val-core/*/greedy/mean_at_1", "score", "mean score of a data source with greedy decoding"),
    ("val-aux/*/mean_at_*", "score", "a number that the reward function returned beside score: mean of a data source"),
    ("val-aux/*/failed", "rows", "samples without a score (left out of the means)"),
    ("val-aux/*/response_length/mean", "tokens", "mean response"),
)

SECTIONS: dict[str, tuple[MetricDoc, ...]] = {
    "The run and its times": (*_RUN, *_BATCH, *_AGREEMENT),
    "Validation": _VALIDATION,
    "Credit assignment": _CREDIT,
    "Failed samples": _FAILURES,
    "Dynamic sampling": _FILTER,
    "Sampler against trainer": _CORRECTION,
    "Updates of the actor": _ACTOR,
    "Updates of the critic": _CRITIC,
    "Updates of any role": _UPDATES,
    "Time and memory by role": _WORK,
    "Safe-RLHF": _SAFE,
    "Weights to the generator": _PUBLISH,
}


def describe(name: str) -> MetricDoc | None:
    """The line of a metric; None: no line fits (a user's own function may add any)."""
    lines = [line for section in SECTIONS.values() for line in section]
    exact = next((line for line in lines if line.name == name), None)
    return exact or next((line for line in lines if fnmatchcase(name, line.name)), None)
