"""Recorded steps of real jobs: which files there are, that their numbers are true, and that nothing else changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hybridflow.cli.profile import recorded
from hybridflow.config.load import load_config
from hybridflow.utils.errors import ConfigError
from hybridflow.workers.profiler import allocations, own_times
from tests.jobs import run_job, small_config

PPO = {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True, "actor_rollout_ref.rollout.n": 1}
CALLS = {
    "rollout.generate_sequences", "reward.compute_reward", "actor.compute_log_prob", "reference.compute_ref_log_prob",
    "critic.compute_values", "actor.compute_advantage", "critic.update_critic", "actor.update_actor", "weights.publish",
}  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    steps = run_job(folder, **PPO, **{"profiler.steps": [2], "trainer.total_training_steps": 2})
    return folder, steps


def calls_of(folder: Path) -> dict[str, dict]:
    return {f"{call['role']}.{call['method']}": call for call in json.loads((folder / "profile.json").read_text())}


def test_every_call_of_a_recorded_step_has_a_line_and_a_trace(job):
    folder = job[0] / "profile" / "step_2"
    calls = calls_of(folder)
    assert set(calls) == CALLS
    assert [path.name for path in (job[0] / "profile").iterdir()] == ["step_2"]
    for name, call in calls.items():
        assert call["files"] == [f"{name}.rank0.trace.json.gz"]
        trace = json.loads(gzip.decompress((folder / call["files"][0]).read_bytes()))
        assert trace["traceEvents"]


def test_the_costliest_operations_come_first_and_fit_into_the_call(job):
    for call in calls_of(job[0] / "profile" / "step_2").values():
        seconds = [cost["seconds"] + cost["device_seconds"] for cost in call["operations"]]
        assert seconds == sorted(seconds, reverse=True)
        assert 0 < sum(seconds) <= 1.05 * call["seconds"]


def test_an_update_is_seen_to_hold_what_adamw_holds(job):
    held = calls_of(job[0] / "profile" / "step_2")["actor.update_actor"]["held_bytes"]
    for role in ("actor", "critic"):
        parameters = held[role]["parameters"]
        assert held[role]["optimizer"] == pytest.approx(2 * parameters, rel=0.01)  # two moments, and step counters
        assert held[role]["gradients"] == 0  # dropped behind every step
    assert held["reference"] == {"parameters": held["actor"]["parameters"], "gradients": 0, "optimizer": 0}
    assert held["rollout"]["weights"] == held["actor"]["parameters"]


def test_the_peak_of_an_update_holds_gradients_of_all_parameters(job):
    call = calls_of(job[0] / "profile" / "step_2")["actor.update_actor"]
    assert call["peak_bytes"] > call["held_bytes"]["actor"]["parameters"]
    assert sum(cost["peak_bytes"] for cost in call["operations"]) == pytest.approx(call["peak_bytes"], rel=0.02)


def test_a_recorded_step_gives_the_same_numbers(job, tmp_path):
    plain = run_job(tmp_path, **PPO, **{"trainer.total_training_steps": 2})
    for one, other in zip(plain, job[1], strict=True):
        same = [name for name in one if not name.startswith(("timing_s/", "perf/", "publish/", "residency/"))]
        assert {name: other[name] for name in same} == {name: one[name] for name in same}


def test_chosen_roles_alone_are_recorded_and_the_run_ends_behind_the_step(tmp_path):
    given = {"profiler.steps": [1], "profiler.roles": ["critic"], "profiler.end_run": True}
    steps = run_job(tmp_path, **PPO, **given, **{"trainer.total_training_steps": 5})
    assert [step["step"] for step in steps] == [1]
    assert set(calls_of(tmp_path / "profile" / "step_1")) == {"critic.compute_values", "critic.update_critic"}


def test_the_command_records_the_second_step_in_a_folder_of_its_own(tmp_path):
    config = recorded(small_config(tmp_path / "run", **{"trainer.total_training_steps": 9, "trainer.save_freq": 1}))
    assert config.profiler.steps == (2,) and config.profiler.end_run
    assert config.trainer.default_local_dir == f"{tmp_path}/run-profile"
    assert (config.trainer.save_freq, config.trainer.test_freq, config.trainer.val_before_train) == (-1, -1, False)
    assert recorded(small_config(tmp_path, **{"profiler.steps": [1]})).profiler.steps == (1,)


def test_a_step_that_the_run_does_not_reach_is_refused():
    with pytest.raises(ConfigError, match=r"profiler\.steps.*step 9 lies behind"):
        load_config({"profiler": {"steps": [9]}, "trainer": {"total_training_steps": 3}})


def test_verl_spellings_mean_the_same():
    config = load_config(
        {
            "global_profiler": {"steps": [1, 2], "tool": "torch", "save_path": "there"},
            "actor_rollout_ref": {"actor": {"profiler": {"enable": True, "all_ranks": True}}},
        }
    )
    assert config.profiler.steps == (1, 2) and config.profiler.all_ranks and config.profiler.save_path == "there"


def test_the_peak_is_that_of_what_was_allocated_at_one_time():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        for _ in range(3):
            first = torch.ones(1 << 20)
            second = torch.zeros(1 << 19)
            del first, second
        kept = torch.ones(1 << 18)
    peak, left, at_peak = allocations(session.profiler.kineto_results.experimental_event_tree())
    assert len(kept) and (peak, left) == (6 << 20, 1 << 20)
    assert sum(at_peak.values()) == peak


def test_own_times_are_those_of_torchs_table():
    square = torch.ones(200, 200, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as session:
        for _ in range(5):
            (square @ square).relu().sum().backward()
    found = own_times(session.profiler.kineto_results.events())
    for event in session.key_averages():
        assert found[event.key].calls == event.count
        assert found[event.key].nanoseconds == pytest.approx(1e3 * event.self_cpu_time_total, rel=1e-3, abs=2e3)
