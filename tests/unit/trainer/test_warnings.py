from __future__ import annotations

import json
import logging
import math

import pytest

from hybridflow.trainer.warnings import PERSISTS, Alarms, symptoms

HEALTHY = {
    "actor/entropy_old": 1.0,
    "actor/ppo_kl": 0.001,
    "actor/reward_kl_penalty": 0.02,
    "groups/zero_spread_share": 0.3,
    "groups/singleton_share": 0.0,
    "critic/score/mean": 0.5,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "response_length/clip_ratio": 0.05,
}
SICK = {
    "entropy": {"actor/entropy_old": 0.01},
    "step_kl": {"actor/ppo_kl": -0.5},
    "reference_kl": {"actor/reward_kl_penalty": 3.0},
    "rewards": {"groups/zero_spread_share": 0.95},
    "length": {"response_length/clip_ratio": 0.8},
}


def test_a_healthy_run_shows_nothing():
    assert symptoms([HEALTHY] * 10, first_entropy=1.0) == {}


@pytest.mark.parametrize("name", SICK)
def test_a_symptom_is_named_with_a_key_to_change(name):
    found = symptoms([HEALTHY, *[HEALTHY | SICK[name]] * PERSISTS], first_entropy=1.0)
    assert list(found) == [name]
    assert "Usual changes" in found[name] and "." in found[name].split("Usual changes")[1]


@pytest.mark.parametrize("name", SICK)
def test_one_odd_step_is_no_symptom(name):
    odd = HEALTHY | SICK[name]
    assert symptoms([odd] * (PERSISTS - 1) + [HEALTHY], first_entropy=1.0) == {}
    assert symptoms([HEALTHY] * PERSISTS + [odd] * (PERSISTS - 1), first_entropy=1.0) == {}


def test_low_entropy_while_the_score_rises_is_success():
    rising = [HEALTHY | SICK["entropy"] | {"critic/score/mean": 0.1 * step} for step in range(8)]
    assert symptoms(rising, first_entropy=1.0) == {}


def test_with_one_sample_per_prompt_the_whole_batch_is_looked_at():
    alone = HEALTHY | {"groups/zero_spread_share": 1.0, "groups/singleton_share": 1.0}
    assert symptoms([alone] * PERSISTS) == {}
    assert "rewards" in symptoms([alone | {"critic/score/max": 0.0}] * PERSISTS)


def test_dynamic_sampling_that_finds_hardly_a_telling_group_is_told_by_what_it_threw_away():
    """The groups that it keeps all have spread; a step that it skips has no metrics of rewards at all."""
    kept = HEALTHY | {"groups/zero_spread_share": 0.0, "filter_groups/telling_share": 0.05}
    message = symptoms([kept] * PERSISTS)["rewards"]
    assert "keeps only 5% of the groups" in message and "filter_groups.enable" not in message
    skipped = {"filter_groups/telling_share": 0.0, "filter_groups/skipped": 1.0}
    assert "keeps only 0%" in symptoms([skipped] * PERSISTS)["rewards"]
    assert symptoms([kept | {"filter_groups/telling_share": 0.5}] * PERSISTS) == {}
    alarms = Alarms()
    assert [len(alarms.look(skipped)) for _ in range(PERSISTS)] == [0, 0, 1]


def test_metrics_that_are_missing_or_not_finite_are_no_symptom():
    assert symptoms([{}] * 5, first_entropy=1.0) == {}
    assert symptoms([{"actor/ppo_kl": float("nan"), "actor/kl_loss": float("inf")}] * 5) == {}


def test_a_kl_that_is_a_sum_over_tokens_is_not_judged_per_token():
    summed = {"actor/kl_loss": 5.0}
    assert "reference_kl" in symptoms([summed] * PERSISTS)
    alarms = Alarms(kl_loss_per_token=False)
    assert [alarms.look(summed) for _ in range(PERSISTS)] == [[]] * PERSISTS


def test_an_episode_is_said_once_and_the_next_one_again(caplog):
    alarms, long = Alarms(), HEALTHY | SICK["length"]
    said = [len(alarms.look(metrics)) for metrics in [long] * 5 + [HEALTHY] + [long] * 4]
    assert said == [0, 0, 1, 0, 0, 0, 0, 0, 1, 0]


def test_the_log_names_the_step(monkeypatch):
    """Reads the module's own logger: jobs that ran in this process before have set up the one above it."""
    said: list[str] = []
    own = logging.getLogger("hybridflow.trainer.warnings")
    monkeypatch.setattr(own, "handle", lambda record: said.append(record.getMessage()))
    alarms = Alarms()
    for step in range(1, 4):
        alarms.say(HEALTHY | SICK["length"] | {"training/global_step": float(step)})
    assert [message[:8] for message in said] == ["step 3: "]


def test_the_first_steps_give_the_entropy_to_compare_with():
    alarms = Alarms()
    for _ in range(PERSISTS):
        assert alarms.look(HEALTHY) == []
    flat = HEALTHY | SICK["entropy"] | {"critic/score/mean": 0.4}
    said = [alarms.look(flat) for _ in range(PERSISTS)]
    assert [len(messages) for messages in said] == [0, 0, 1]
    assert "entropy has collapsed to 0.01 nats (from 1)" in said[-1][0]


@pytest.mark.parametrize("stop", range(1, 12))
def test_alarms_that_were_saved_and_restored_say_what_undisturbed_ones_say(stop):
    """Exact resume: an episode is not said twice, a count of steps goes on, the first entropy is remembered."""
    flat = HEALTHY | SICK["entropy"] | {"critic/score/mean": 0.4}
    long = HEALTHY | SICK["length"] | {"actor/ppo_kl": math.nan}
    run = [HEALTHY] * 4 + [flat] * 4 + [HEALTHY] + [long] * 4
    whole = Alarms()
    expected = [whole.look(metrics) for metrics in run]
    assert sum(map(len, expected)) == 2
    before, after = Alarms(), Alarms()
    said = [before.look(metrics) for metrics in run[:stop]]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert said + [after.look(metrics) for metrics in run[stop:]] == expected
