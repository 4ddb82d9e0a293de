"""The one table of columns that travel between roles: name, dtype, shape, unit, writer.

Shape alphabet: B sequences (prompts x samples), P longest prompt, T longest response of the batch, object columns hold
one Python value per row. Token columns are padded on the right; what lies beyond a row's length is padding and never
read. A column that is not in the table may travel too (the user's own); it is padded with 0 when widths differ.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """One entry of the table."""

    name: str
    dtype: str
    shape: str
    unit: str
    writer: str
    pad: float = 0


TABLE: dict[str, Column] = {
    column.name: column
    for column in (
        Column("prompt_ids", "int64", "B P", "token ids, right-padded", "data"),
        Column("prompt_length", "int64", "B", "tokens", "data"),
        Column("group_id", "int64", "B", "prompt number; samples of one prompt share it", "data"),
        Column("sample_index", "int64", "B", "0..n-1 within the group", "trainer"),
        Column("row_id", "int64", "B", "dataset row of the prompt", "data"),
        Column("data_source", "object", "B", "scorer name", "data"),
        Column("ground_truth", "object", "B", "what the scorer compares with", "data"),
        Column("extra_info", "object", "B", "dict, may be empty", "data"),
        Column("raw_prompt", "object", "B", "chat list or text", "data"),
        Column("response_ids", "int64", "B T", "token ids as sampled, right-padded", "rollout"),
        Column("response_length", "int64", "B", "tokens, policy and environment alike", "rollout"),
        Column("response_mask", "bool", "B T", "True where the policy wrote the token", "rollout"),
        Column("rollout_log_probs", "float32", "B T", "nats, of the distribution sampled from", "rollout"),
        Column("weight_version", "int64", "B T", "published version each token was sampled from", "rollout"),
        Column("finish_reason", "object", "B", "stop, length or abort", "rollout"),
        Column("valid", "bool", "B", "False: the sample failed and counts nowhere", "rollout, reward"),
        Column("score", "float64", "B", "raw score of the reward function or model", "reward"),
        Column("response_text", "object", "B", "decoded response, special tokens left out", "reward"),
        Column("reward_info", "object", "B", "dict of further numbers of the scorer", "reward"),
        Column("token_scores", "float32", "B T", "raw rewards of parts of the response, at their ends", "reward"),
        Column("old_log_probs", "float32", "B T", "nats, tempered, at the start of the step", "actor"),
        Column("old_entropy", "float32", "B T", "nats, tempered, at the start of the step", "actor"),
        Column("old_sum_pi_squared", "float32", "B T", "sum of squared token probabilities, tempered", "actor"),
        Column("baseline_score", "float64", "B", "raw score of the prompt's greedy response (remax)", "trainer"),
        Column("baseline_length", "int64", "B", "tokens of the prompt's greedy response (remax)", "trainer"),
        Column("ref_log_probs", "float32", "B T", "nats, tempered", "reference"),
        Column("full_kl", "float32", "B T", "nats, exact KL(policy || reference), tempered", "actor"),
        Column("values", "float32", "B T", "return expected before the token", "critic"),
        Column(
            "loss_mask", "bool", "B T", "response_mask of valid, not rejected rows; every loss uses it", "advantage"
        ),
        Column("token_rewards", "float32", "B T", "shaped reward per token", "advantage"),
        Column("advantages", "float32", "B T", "0 at masked positions", "advantage"),
        Column("returns", "float32", "B T", "critic target", "advantage"),
        Column("cost", "float64", "B", "cost named by the reward function (Safe-RLHF)", "trainer"),
        Column("cost_values", "float32", "B T", "cost expected before the token", "cost_critic"),
        Column("cost_returns", "float32", "B T", "target of the cost critic", "advantage"),
        Column("row_index", "int64", "B", "position in the batch of the step; names the row's mini-batch", "roles"),
        Column("covariance_selected", "bool", "B T", "tokens that clip_cov and kl_cov single out", "advantage"),
        Column("ptx_weight", "float32", "B T", "1 / text tokens of the mini-batch, on tokens of text", "actor"),
        Column("correction_weights", "float32", "B T", "importance weight old/rollout, no gradient", "advantage"),
    )
}


def pad_value(name: str) -> float:
    """What fills the right of a narrower block when blocks of one column are joined."""
    return TABLE[name].pad if name in TABLE else 0
