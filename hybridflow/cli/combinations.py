"""docs/algorithms/combinations.md: which options combine, found by asking the validator about every pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.config.choices import ADV_ESTIMATORS, POLICY_LOSSES
from hybridflow.config.load import load_config
from hybridflow.config.problems import InvalidConfigError

MADE_BY = "<!-- Made by `python -m hybridflow.config_keys --write docs/reference`; do not edit. -->\n"
ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
SMALL: dict[str, Any] = {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8}
NEEDED: dict[str, dict[str, Any]] = {"gdpo": {"algorithm.gdpo_reward_keys": ["correct", "format"]}}
"""What a choice cannot do without."""

OPTIONS: dict[str, dict[str, Any]] = {
    "one sample per prompt": {"actor_rollout_ref.rollout.n": 1},
    "critic off": {"critic.enable": False},
    "critic on": {"critic.enable": True},
    "KL in reward": {"algorithm.use_kl_in_reward": True},
    "KL in loss": {"actor_rollout_ref.actor.use_kl_loss": True},
    "overlong penalty": {"reward.overlong.enable": True, "reward.overlong.len": 2},
    "dynamic sampling": {"algorithm.filter_groups.enable": True},
    "importance weights": {f"{CORRECTION}.rollout_is": "token"},
    "rejection": {f"{CORRECTION}.rollout_rs": "seq_mean_k1"},
    "bypass": {f"{CORRECTION}.bypass_mode": True},
    "Safe-RLHF": {"algorithm.safe_rlhf.enable": True},
    "PPO-ptx": {"algorithm.ptx_coef": 0.1, "algorithm.ptx_files": ["text.txt"]},
    "no entropy": {"actor_rollout_ref.actor.calculate_entropy": False},
}
"""Switches of a run by what they are called in the table."""

ALONE: dict[str, Any] = {ESTIMATOR: "reinforce_plus_plus"}
"""What losses and switches are judged under: an estimator that takes every switch by itself."""

YES, NO = "yes", "no"


def refusal(chosen: Mapping[str, Any]) -> str | None:
    """Why the validator refuses ``chosen`` (dotted keys); None: it takes them."""
    tree: dict[str, Any] = {}
    for key, value in {**SMALL, **chosen}.items():
        *parents, leaf = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    try:
        load_config(tree)
    except InvalidConfigError as error:
        return " ".join(str(problem) for problem in error.problems)
    return None


def combinations_page() -> str:
    """Tables of estimators, losses and switches, and every refusal in the validator's words."""
    refusals: dict[str, list[str]] = {}
    lines = [
        MADE_BY,
        "# What combines\n",
        "Asked of the validator (`hybridflow/config/checks.py`), pair by pair: **no** is refused before anything",
        "starts, for the reason given below. Every estimator combines with every policy loss and every aggregation.\n",
        "| switch | keys |",
        "|---|---|",
    ]
    for title, keys in OPTIONS.items():
        lines.append(f"| {title} | {_keys(keys)} |")
    for heading, key, names in (
        ("Estimators and switches", ESTIMATOR, ADV_ESTIMATORS),
        ("Policy losses and switches", LOSS, POLICY_LOSSES),
    ):
        lines += _table(heading, key, names, refusals)
    lines += _switches(refusals)
    lines += ["\n## Why\n"]
    for reason, where in sorted(refusals.items()):
        lines.append(f"- {', '.join(where)}: {reason}")
    return "\n".join(lines) + "\n"


def pairs_of_estimator_and_loss() -> list[str]:
    """Pairs that the validator refuses; the page says that there are none."""
    refused = []
    for estimator in ADV_ESTIMATORS:
        for loss in POLICY_LOSSES:
            reason = refusal({ESTIMATOR: estimator, LOSS: loss, **NEEDED.get(estimator, {})})
            refused += [] if reason is None else [f"{estimator} + {loss}: {reason}"]
    return refused


def _table(heading: str, key: str, names: tuple[str, ...], refusals: dict[str, list[str]]) -> list[str]:
    lines = [f"\n## {heading}\n", f"| | {' | '.join(OPTIONS)} |", "|---" * (len(OPTIONS) + 1) + "|"]
    for name in names:
        answers = []
        for title, keys in OPTIONS.items():
            reason = refusal({**ALONE, key: name, **NEEDED.get(name, {}), **keys})
            answers.append(YES if reason is None else f"**{NO}**")
            if reason is not None:
                reason = reason.replace(f"={name}", "=...")
                refusals.setdefault(reason, []).append(f"`{name}` + {title}")
        lines.append(f"| `{name}` | {' | '.join(answers)} |")
    return lines


def _switches(refusals: dict[str, list[str]]) -> list[str]:
    """Switches with one another, under an estimator that takes each alone."""
    titles = list(OPTIONS)
    lines = ["\n## Switches with one another\n", f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for row, first in enumerate(titles):
        answers = []
        for column, second in enumerate(titles):
            if column >= row or OPTIONS[first].keys() & OPTIONS[second].keys():
                answers.append("")
                continue
            reason = refusal({**ALONE, **OPTIONS[first], **OPTIONS[second]})
            answers.append(YES if reason is None else f"**{NO}**")
            if reason is not None:
                refusals.setdefault(reason, []).append(f"{second} + {first}")
        lines.append(f"| {first} | {' | '.join(answers)} |")
    return lines


def _keys(chosen: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={_shown(value)}`" for key, value in chosen.items())


def _shown(value: Any) -> str:
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
