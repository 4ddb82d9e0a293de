"""Every estimator, loss and option of the algorithm library runs in the main job, and none of them is dead.

A dead option is read by nobody. The configuration sections record what is read while jobs run; over all jobs here every
leaf of the algorithm and actor trees must have been read by someone past the loader.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hybridflow.algorithms import correction
from hybridflow.algorithms.correction import accepted
from hybridflow.config.actor import ActorConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.choices import ADV_ESTIMATORS, EXACT_KL, KL_TYPES, LOSS_AGG_MODES, POLICY_LOSSES, REJECTIONS
from hybridflow.config.constraints import Section, hints
from hybridflow.config.tree import section_of
from hybridflow.config.unread import is_unread
from hybridflow.utils.errors import WorkerError
from tests.jobs import run_job
from tests.unit.algorithms.cases import lists
from tests.unit.algorithms.test_correction import LEVELS, LONG, STATISTICS

ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction."
COMPONENTS = str(Path(__file__).parent / "reward_of_two_components.py")
COSTS = str(Path(__file__).parent / "reward_with_cost.py")
NEEDED: dict[str, dict[str, Any]] = {
    "gdpo": {
        "algorithm.gdpo_reward_keys": ["exact", "short"],
        "reward.custom_reward_function.path": COMPONENTS,
    },
    "grpo_passk": {"algorithm.norm_adv_by_std_in_grpo": False},
}
ALIASES = (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"))
SETTING = "actor_rollout_ref.actor.policy_loss."
TELLING: dict[str, dict[str, Any]] = {
    "clip_cov": {f"{SETTING}clip_cov_ratio": 0.2, f"{SETTING}clip_cov_lb": 0.0},
    "kl_cov": {f"{SETTING}kl_cov_ratio": 0.2, f"{SETTING}ppo_kl_coef": 1.0},
    "dppo_tv": {f"{SETTING}dppo_threshold": 1e-4},
    "dppo_kl": {f"{SETTING}dppo_threshold": 1e-6},
}
"""Settings under which a loss differs from the clipped surrogate already for the first small steps."""


def _finite_and_learning(steps: list[dict[str, Any]]) -> None:
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        groups = min(8, step.get("filter_groups/telling", 8))
        assert step["actor/optimizer_steps"] == math.ceil(groups / 4) and step["actor/grad_skipped"] == 0
        assert math.isfinite(step["actor/pg_loss"]) and math.isfinite(step["actor/grad_norm"])
        assert step["training/rollout_log_prob_diff/max"] < 1e-4
    assert any(step["actor/grad_norm"] > 0 for step in steps)


Jobs = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Jobs:
    """Metrics of the job with these options; each runs once in this module."""
    done: dict[str, list[dict[str, Any]]] = {}

    def of(**options: Any) -> list[dict[str, Any]]:
        key = json.dumps(options, sort_keys=True)
        if key not in done:
            done[key] = run_job(tmp_path_factory.mktemp("job"), **options)
        return done[key]

    return of


def _alike(jobs: Mapping[str, list[dict[str, Any]]], *names: str) -> list[set[str]]:
    """Jobs that had the same numbers of ``names`` in every step."""
    found: dict[tuple[float, ...], set[str]] = {}
    for title, steps in jobs.items():
        numbers = tuple(round(step[name], 9) for step in steps for name in names)
        found.setdefault(numbers, set()).add(title)
    return [titles for titles in found.values() if len(titles) > 1]


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_an_estimator_runs_in_the_main_job(job, name):
    steps = job(**{ESTIMATOR: name, **NEEDED.get(name, {})})
    _finite_and_learning(steps)
    assert ("critic/vf_loss" in steps[0]) == (name == "gae")
    if name == "gae":  # A14: two mini-batches of four prompts for the critic too, whatever the samples per prompt
        assert all(step["critic/optimizer_steps"] == step["actor/optimizer_steps"] for step in steps)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_runs_in_the_main_job(job, name):
    _finite_and_learning(job(**{LOSS: name, **TELLING.get(name, {})}))


def test_the_configured_estimator_and_loss_are_those_that_are_used(job):
    """The same data from the same start, other numbers: all pairs but those that are one by definition."""
    estimators = {name: job(**{ESTIMATOR: name, **NEEDED.get(name, {})}) for name in ADV_ESTIMATORS}
    one_turn = [{"optimal_token_baseline", "tir_optimal_token_baseline"}]  # they differ where tools speak
    assert _alike(estimators, "actor/grad_norm", "critic/advantages/max") == one_turn
    losses = {name: job(**{LOSS: name, **TELLING.get(name, {})}) for name in POLICY_LOSSES}
    assert _alike(losses, "actor/pg_loss", "actor/grad_norm") == [{"gpg", "reinforce"}]


def test_a_users_own_loss_gets_the_columns_that_it_asks_for(job):
    steps = job(**{LOSS: "tests.integration.own_loss:by_entropy"})
    _finite_and_learning(steps)
    assert all(step["actor/entropy_weight"] == pytest.approx(step["actor/entropy_old"], rel=0.2) for step in steps)


def _aggregated(mode: str) -> dict[str, Any]:
    return {
        "actor_rollout_ref.actor.loss_agg_mode": mode,
        "critic.loss_agg_mode": mode,
        "actor_rollout_ref.actor.entropy_coeff": 0.01,
        "actor_rollout_ref.actor.use_kl_loss": True,
        ESTIMATOR: "gae",
    }


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_aggregation_serves_policy_entropy_kl_and_values(job, mode):
    steps = job(**_aggregated(mode))
    _finite_and_learning(steps)
    assert all(math.isfinite(step[f"actor/{term}"]) for step in steps for term in ("kl_loss", "entropy"))


def test_the_configured_aggregation_is_the_one_that_is_used(job):
    jobs = {mode: job(**_aggregated(mode)) for mode in LOSS_AGG_MODES}
    assert not _alike(jobs, "actor/grad_norm")
    assert not _alike(jobs, "critic/grad_norm")


SAMPLED_KL = [kind for kind in KL_TYPES if kind not in EXACT_KL]


def _with_kl(kind: str) -> dict[str, Any]:
    at = "actor_rollout_ref.actor"
    return {f"{at}.use_kl_loss": True, f"{at}.kl_loss_coef": 1.0, f"{at}.optim.lr": 3e-3, f"{at}.kl_loss_type": kind}


@pytest.mark.parametrize("kind", SAMPLED_KL)
def test_a_sampled_kl_of_each_kind_runs_in_the_loss(job, kind):
    _finite_and_learning(job(**_with_kl(kind)))


def test_the_configured_kl_is_the_one_that_is_used_and_its_plus_changes_the_gradient_alone(job):
    """Step 1 begins at KL 0; from the second mini-batch on kinds differ. A ``+`` form keeps the value of its kind and
    takes one gradient for all of them, that of k2: runs of + forms walk the same way and report other values."""
    jobs = {kind: job(**_with_kl(kind)) for kind in SAMPLED_KL}
    aliases = [{name + plus, other + plus} for plus in ("", "+") for name, other in ALIASES]
    alike = _alike(jobs, "actor/kl_loss", "actor/grad_norm")
    assert sorted(map(sorted, alike)) == sorted(map(sorted, aliases))
    bare = ("k1", "abs", "k2", "k3")
    assert not _alike({kind: jobs[kind] for kind in (*bare, "k1+")}, "actor/grad_norm")
    assert _alike({kind: jobs[f"{kind}+"] for kind in bare}, "actor/grad_norm") == [set(bare)]
    assert jobs["k2+"][0]["actor/kl_loss"] == pytest.approx(jobs["k2"][0]["actor/kl_loss"], rel=0.2)


REJECTED: dict[str, str] = {
    "token_k1": "1.0012",
    "token_k2": "7e-07",
    "token_k3": "7e-07",
    "seq_sum_k1": "1.0110",
    "seq_sum_k2": "7.9e-05",
    "seq_sum_k3": "7.9e-05",
    "seq_mean_k1": "1.0031",
    "seq_mean_k2": "2.5e-05",
    "seq_mean_k3": "2.4e-05",
    "seq_max_k2": "6.4e-05",
    "seq_max_k3": "6.3e-05",
    "token": "1.0012",
    "sequence": "1.0110",
    "geometric": "1.0031",
}
"""Bounds within which about half of what a sampler in bf16 says lies."""


@pytest.mark.parametrize("name", REJECTIONS)
def test_a_rejection_of_each_name_takes_out_of_the_job_what_its_definition_says(tmp_path, monkeypatch, name):
    """A sampler in bf16 beside a trainer in fp32: log-probs that differ by a few thousandths, as they do on GPUs."""
    seen: list[list[list[float]]] = []

    def watching(*, log_ratio, mask, config):
        seen.append(lists(log_ratio, mask))
        return accepted(log_ratio=log_ratio, mask=mask, config=config)

    monkeypatch.setattr(correction, "accepted", watching)
    options = {f"{CORRECTION}rollout_rs": name, f"{CORRECTION}rollout_rs_threshold": REJECTED[name]}
    steps = run_job(tmp_path, **options, **{"actor_rollout_ref.rollout.dtype": "bfloat16"})
    assert len(seen) == len(steps) == 2
    level, _, statistic = LONG.get(name, name).rpartition("_")
    bound = float(REJECTED[name])
    for rows, step in zip(seen, steps, strict=True):
        assert step["actor/optimizer_steps"] == 2 and step["actor/grad_skipped"] == 0
        found = [LEVELS[level](row, STATISTICS[statistic]) for row in rows]
        flat = [value for row in found for value in row]
        if statistic == "k1":
            rejected = [not 1 / bound <= math.exp(-value) <= bound for value in flat]
        else:
            rejected = [value > bound for value in flat]
        share = sum(rejected) / len(flat)
        assert 0 < share < 1
        assert step["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share, abs=1e-9)
        assert step["batch/trained_tokens"] == len(flat) - sum(rejected)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 4},
        {"algorithm.reward_shaping.normalize": True, "algorithm.reward_shaping.clip": 1.0},
        {"algorithm.reward_shaping.length_penalty": 0.01, "reward.overlong.enable": True, "reward.overlong.len": 2},
        {f"{CORRECTION}rollout_is": "token", f"{CORRECTION}rollout_is_batch_normalize": True},
        {
            f"{CORRECTION}rollout_is": "sequence",
            f"{CORRECTION}rollout_token_veto_threshold": 1e-4,
            f"{CORRECTION}guard_max_log_ratio": 10.0,
        },
        {f"{CORRECTION}bypass_mode": True, f"{CORRECTION}rollout_rs": "token_k1"},
        {
            f"{CORRECTION}bypass_mode": True,
            f"{CORRECTION}loss_type": "reinforce",
            f"{CORRECTION}rollout_is": "sequence",
        },
        {"algorithm.safe_rlhf.enable": True, "reward.custom_reward_function.path": COSTS},
        {"algorithm.ptx_coef": 0.1, "algorithm.ptx_files": [str(Path(__file__).parent / "text.txt")]},
    ],
    ids=lambda options: "-".join(key.rsplit(".", 1)[-1] for key in options),
)
def test_an_option_of_credit_assignment_runs_in_the_main_job(tmp_path, options):
    _finite_and_learning(run_job(tmp_path, **options))


def test_a_guard_that_trips_takes_the_correction_away_or_stops_the_run(tmp_path, job):
    """Trainer and sampler differ by about 1e-6: a band of 1e-12 is left at once."""
    guard = {f"{CORRECTION}guard_max_log_ratio": 1e-12, f"{CORRECTION}rollout_is": "token"}
    steps = job(**guard, **{f"{CORRECTION}guard_action": "fallback"})
    assert [step["rollout_corr/guard_tripped"] for step in steps] == [1, 1]
    assert "rollout_corr/rollout_is_mean" not in steps[0]
    with pytest.raises(WorkerError, match="guard_max_log_ratio"):
        run_job(tmp_path, **guard, **{f"{CORRECTION}guard_action": "stop"})


ONE_UPDATE = {
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "actor_rollout_ref.actor.optim.lr": 3e-3,
    "actor_rollout_ref.rollout.temperature": 0.7,
}
LORA = {
    "actor_rollout_ref.model.lora_rank": 4,
    "actor_rollout_ref.model.lora_alpha": 8.0,
    "actor_rollout_ref.actor.optim.lr": 1e-2,
}


@pytest.mark.parametrize("more", [{}, LORA], ids=["all weights", "lora"])
def test_the_exact_kl_runs_in_the_loss_and_in_the_reward(tmp_path, more):
    """The policy is the reference in step 1: KL 0. In step 2 it is one and the same policy under every estimator,
    because its gradient at KL 0 is 0 too (that of the reward's KL: advantages see a KL of 0): the exact value is what
    the sampled low-variance estimate of some hundred tokens scatters around. At temperature 0.7: the reference is
    tempered as the policy is (D14), or step 1 would not show 0."""
    found = {}
    for kind in ("full", "low_var_kl") if more else ("full", "full+", "low_var_kl"):
        loss = {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_type": kind}
        steps = run_job(tmp_path / kind, **{**ONE_UPDATE, **more, **loss})
        assert [step["actor/grad_skipped"] for step in steps] == [0, 0]
        assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
        assert ("timing_s/ref" in steps[0]) == (kind != "full")
        found[kind] = steps[1]["actor/kl_loss"]
        reward = {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": kind}
        steps = run_job(tmp_path / f"reward_{kind}", **{**ONE_UPDATE, **more, **reward})
        assert steps[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
        assert ("timing_s/ref" in steps[0]) == (kind == "low_var_kl")
        found[f"reward {kind}"] = steps[1]["actor/reward_kl_penalty"]
    assert found["full"] == pytest.approx(found.get("full+", found["full"]), rel=1e-4)
    assert found["full"] > 1e-5
    assert 0.5 < found["low_var_kl"] / found["full"] < 2
    assert found["reward full"] == pytest.approx(found.get("reward full+", found["reward full"]), rel=1e-4)
    assert 0.5 < found["reward low_var_kl"] / found["reward full"] < 2


@pytest.fixture(scope="module", autouse=True)
def read_fields() -> Iterator[set[tuple[str, str]]]:
    """(class, field) of every configuration section that is read outside the configuration itself in this module."""
    read: set[tuple[str, str]] = set()
    judges = (f"{os.sep}config{os.sep}", "dataclasses.py", "copy.py")

    def recording(section: Any, name: str) -> Any:
        if not any(judge in sys._getframe(1).f_code.co_filename for judge in judges):
            read.add((type(section).__name__, name))
        return object.__getattribute__(section, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", recording, raising=False)
        yield read


def test_every_leaf_of_the_algorithm_and_actor_trees_was_read_by_someone(tmp_path, read_fields):
    """Runs last: the jobs above have covered the options. A leaf that nobody read is dead."""
    run_job(tmp_path, **{"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4})
    unread = {
        f"{key}.{field.name}"
        for key, section in _sections("algorithm", AlgorithmConfig) + _sections("actor_rollout_ref.actor", ActorConfig)
        for field in dataclasses.fields(section)
        if (section.__name__, field.name) not in read_fields and not is_unread(f"{key}.{field.name}")
    }
    assert not unread


def _sections(key: str, kind: type) -> list[tuple[str, type]]:
    nested = [(f"{key}.{name}", section_of(hint)) for name, hint in hints(kind).items()]
    return [(key, kind), *((at, section) for at, section in nested if section is not None)]
