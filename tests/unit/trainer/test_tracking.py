from __future__ import annotations

import json
import logging
import math
import os
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import wandb

from hybridflow.config.choices import TRACKERS as CHOICES
from hybridflow.trainer import tracking
from hybridflow.trainer.tracking import (
    TRACKERS,
    CompositeTracker,
    JsonlTracker,
    RunInfo,
    build_trackers,
    clean_name,
    plain_metrics,
)
from hybridflow.utils.errors import ConfigError


def info(folder, total_steps=5):
    return RunInfo(project="p", experiment="e", folder=folder, config={"lr": 1e-6}, total_steps=total_steps)


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


class Recorder:
    def __init__(self, fails=False):
        self.fails = fails
        self.seen = []

    def log(self, step, metrics):
        if self.fails:
            raise OSError("the server is gone")
        self.seen.append((step, dict(metrics)))

    def log_samples(self, step, samples):
        self.seen.append((step, list(samples)))

    def finish(self):
        self.seen.append("finished")


def test_the_registry_is_what_the_config_allows():
    assert tuple(TRACKERS) == CHOICES


def test_samples_are_json_whatever_their_scores(tmp_path):
    tracker = JsonlTracker(RunInfo(project="p", experiment="e", folder=tmp_path, config={}, total_steps=1))
    tracker.log_samples(1, [{"score": math.nan, "info": {"parts": [1.0, math.inf]}, "ground_truth": "2"}])
    text = (tmp_path / "samples.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1, "score": None, "info": {"parts": [1.0, None]}, "ground_truth": "2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("val/acc/best@4/mean", "val/acc/best_at_4/mean"),
        ("a  b", "a_b"),
        ("/x//y///z/", "x/y/z"),
        ("loss (mean)", "loss_mean_"),
        ("längd", "l_ngd"),
        ("", "unnamed"),
        ("timing_s/old_log_prob", "timing_s/old_log_prob"),
    ],
)
def test_a_name_is_cleaned_to_what_every_backend_takes(given, cleaned):
    assert clean_name(given) == cleaned
    assert clean_name(cleaned) == cleaned


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (True, {"m": 1}),
        (3, {"m": 3}),
        (np.float32(0.5), {"m": 0.5}),
        (np.bool_(True), {"m": 1}),
        (np.array([2.0]), {"m": 2.0}),
        (np.array([[7]]), {"m": 7}),
        (torch.tensor(1.5), {"m": 1.5}),
        (torch.tensor([4]), {"m": 4}),
        ([1.0, 2.0, 6.0], {"m/mean": 3.0, "m/min": 1.0, "m/max": 6.0}),
        ([[1], [3]], {"m/mean": 2.0, "m/min": 1, "m/max": 3}),
        ([np.float64(1), torch.tensor(3.0)], {"m/mean": 2.0, "m/min": 1.0, "m/max": 3.0}),
        ([], {}),
        ([[]], {}),
        (np.zeros(0), {}),
        (None, {}),
        ("grpo", {"m": "grpo"}),
        (["a", "b"], {"m": "['a', 'b']"}),
        ({"x": 1, "y": {"z": 2}}, {"m/x": 1, "m/y/z": 2}),
    ],
)
def test_a_value_of_any_kind_becomes_plain_numbers_or_text(value, plain):
    found = plain_metrics({"m": value})
    assert found == plain
    assert all(type(v) in (int, float, str) for v in found.values())


def test_a_nan_stays_visible_alone_and_in_a_list():
    assert math.isnan(plain_metrics({"m": float("nan")})["m"])
    spread = plain_metrics({"m": [1.0, float("nan"), 0.0]})
    assert all(math.isnan(value) for value in spread.values())


def test_two_names_that_become_equal_both_stay():
    assert plain_metrics({"a b": 1, "a_b": 2, "a/b": 3}) == {"a_b": 1, "a_b_2": 2, "a/b": 3}


def test_a_destination_that_fails_warns_once_and_the_others_go_on(caplog):
    good = Recorder()
    both = CompositeTracker({"bad": Recorder(fails=True), "good": good})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            both.log(step, {"reward": 0.5})
        both.finish()
    assert [entry[0] for entry in good.seen[:3]] == [1, 2, 3]
    messages = [record.getMessage() for record in caplog.records]
    assert sum("the server is gone" in message for message in messages) == 1
    assert "tracker bad lost 3 calls" in messages


class Stuck(Recorder):
    """Comes back from nothing after its first call."""

    def __init__(self):
        super().__init__()
        self.abandoned = 0
        self.released = threading.Event()

    def log(self, step, metrics):
        if self.seen:
            self.released.wait(30.0)
        super().log(step, metrics)

    def abandon(self):
        self.abandoned += 1


def test_a_destination_that_does_not_come_back_is_given_up_and_the_others_go_on(caplog):
    stuck, good = Stuck(), Recorder()
    both = CompositeTracker({"far": stuck, "good": good}, deadline_s=1)
    begun = time.monotonic()
    for step in (1, 2, 3, 4):
        both.log(step, {"reward": 0.5})
    both.finish()
    stuck.released.set()
    assert time.monotonic() - begun < 5.0
    assert good.seen[-1] == "finished" and [entry[0] for entry in good.seen[:-1]] == [1, 2, 3, 4]
    assert stuck.abandoned == 1 and "finished" not in stuck.seen
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [
        "tracker far did not come back within 1 s (trainer.timeouts.track_s) and is given up; training goes on",
        "tracker far lost 4 calls",
    ]


WANDB_STOPS = """
import logging, os, psutil, signal, sys
from hybridflow.trainer.tracking import build_trackers
logging.basicConfig(level=logging.WARNING)
tracker = build_trackers(["wandb"], project="p", experiment="e", folder=sys.argv[1], config={}, total_steps=2,
                         deadline_s=20.0)
tracker.log(1, {"reward": 1.0})
(service,) = [child for child in psutil.Process().children() if "wandb-core" in child.name()]
os.kill(service.pid, signal.SIGSTOP)
tracker._deadline_s = 0.5
tracker.finish()
print("left", flush=True)
"""


def test_a_wandb_that_hangs_at_the_end_keeps_no_run_from_ending(tmp_path):
    """Its service is stopped: neither ``finish`` nor W&B's own exit hook would ever come back."""
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", WANDB_STOPS, str(tmp_path)],
        capture_output=True, text=True, timeout=60, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "left", done.stderr
    assert "did not come back within 0.5 s" in done.stderr and "wandb sync DIR" in done.stderr


@pytest.mark.parametrize(("experiment", "goes_on"), [("e", True), ("branch", False)])
def test_a_run_that_goes_on_in_another_folder_goes_on_in_its_wandb_run(tmp_path, monkeypatch, experiment, goes_on):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    state, ids = {}, []
    for folder, name in (("here", "e"), ("there", experiment)):
        trackers = build_trackers(
            ["jsonl", "wandb"], project="p", experiment=name, folder=tmp_path / folder, config={}, total_steps=3
        )
        trackers.load_state_dict(state)
        trackers.log(2, {"reward": 0.25})
        state = json.loads(json.dumps(trackers.state_dict()))
        trackers.finish()
        ids.append((tmp_path / folder / "wandb_run_id").read_text())
    assert (ids[0] == ids[1]) is goes_on


def test_finish_closes_each_destination_once():
    inner = Recorder()
    composite = CompositeTracker({"x": inner})
    composite.finish()
    composite.finish()
    assert inner.seen == ["finished"]


def test_an_unknown_tracker_is_refused_with_the_allowed_names(tmp_path):
    with pytest.raises(ConfigError, match="'wandbb'; allowed: console, jsonl"):
        build_trackers(["wandbb"], project="p", experiment="e", folder=tmp_path, config={}, total_steps=1)


def test_a_tracker_whose_package_is_missing_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(tracking.TRACKERS, "wandb", "not_installed_anywhere:Tracker")
    with pytest.raises(ConfigError, match="not_installed_anywhere"):
        build_trackers(["wandb"], project="p", experiment="e", folder=tmp_path, config={}, total_steps=1)


def test_a_tracker_that_cannot_start_is_left_out_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    trackers = build_trackers(
        ["tensorboard", "jsonl"], project="p", experiment="e", folder=tmp_path, config={}, total_steps=1
    )
    trackers.log(1, {"reward": 1.0})
    assert lines(tmp_path) == [{"step": 1, "reward": 1.0}]
    assert "tracker tensorboard cannot start" in caplog.text


def test_jsonl_holds_one_valid_json_object_a_step(tmp_path):
    tracker = JsonlTracker(info(tmp_path))
    tracker.log(0, {"val": 0.25})
    tracker.log(1, {"loss": float("nan"), "grad": float("inf"), "reward": 0.5})
    tracker.log(1, {"val": 0.3})
    text = (tmp_path / "metrics.jsonl").read_text()
    strict = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert strict == [
        {"step": 0, "val": 0.25},
        {"step": 1, "loss": None, "grad": None, "reward": 0.5, "val": 0.3},
    ]


def test_a_line_that_cannot_be_completed_stays_as_it_was(tmp_path, monkeypatch):
    tracker = JsonlTracker(info(tmp_path))
    tracker.log(1, {"reward": 0.5})

    def die(*_):
        raise OSError("killed here")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed here"):
        patch.setattr(os, "pwrite", die)
        tracker.log(1, {"more": 1})
    assert lines(tmp_path) == [{"step": 1, "reward": 0.5}]
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed here"):
        patch.setattr(os, "ftruncate", die)
        tracker.log(1, {"more": 1})
    assert lines(tmp_path) == [{"step": 1, "reward": 0.5, "more": 1}]


def test_a_resumed_run_appends_without_duplicate_or_torn_steps(tmp_path):
    first = JsonlTracker(info(tmp_path))
    for step in range(5):
        first.log(step, {"reward": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')
    resumed = JsonlTracker(info(tmp_path))
    for step in (3, 4, 5, 6):
        resumed.log(step, {"reward": 10 * step})
    assert [(row["step"], row["reward"]) for row in lines(tmp_path)] == [
        (0, 0), (1, 1), (2, 2), (3, 30), (4, 40), (5, 50), (6, 60),
    ]  # fmt: skip


def test_a_last_line_that_lost_only_its_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    JsonlTracker(info(tmp_path)).log(3, {})
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]


def test_lines_that_a_cut_file_has_lost_are_named(tmp_path, caplog):
    first = JsonlTracker(info(tmp_path))
    for step in range(1, 6):
        first.log(step, {"reward": step})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])  # through the line of step 4
    JsonlTracker(info(tmp_path)).log(6, {})
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3, 6]
    assert "metrics.jsonl lacks the lines of 2 steps before step 6: 4, 5" in caplog.text


@pytest.mark.parametrize("first_step", [0, 1])
def test_a_new_run_in_a_used_folder_keeps_the_old_file_aside(tmp_path, first_step):
    JsonlTracker(info(tmp_path)).log(1, {"reward": 1})
    for run in (2, 3):
        tracker = JsonlTracker(info(tmp_path))
        tracker.log_samples(first_step, [{"prompt": "1+1="}])
        tracker.log(first_step, {"reward": run})
    assert lines(tmp_path) == [{"step": first_step, "reward": 3}]
    assert lines(tmp_path, "metrics.old-1.jsonl") == [{"step": 1, "reward": 1}]
    assert lines(tmp_path, "metrics.old-2.jsonl") == [{"step": first_step, "reward": 2}]
    assert len(lines(tmp_path, "samples.jsonl")) == 1


def test_tensorboard_files_hold_the_logged_numbers(tmp_path):
    trackers = build_trackers(
        ["tensorboard"], project="p", experiment="e", folder=tmp_path, config={"lr": 1e-6}, total_steps=2
    )
    trackers.log(1, {"reward@1": 0.25, "note": "text", "loss": float("nan")})
    trackers.log_samples(1, [{"prompt": "1+1=", "score": 1.0}])
    trackers.log(2, {"reward@1": 0.5})
    trackers.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward_at_1")] == [(1, 0.25), (2, 0.5)]
    assert "note" not in events.Tags()["scalars"]


def test_tensorboard_shows_a_step_that_was_done_twice_once(tmp_path):
    for steps, value in (((1, 2, 3), 0.0), ((2, 3), 1.0)):
        trackers = build_trackers(
            ["tensorboard"], project="p", experiment="e", folder=tmp_path, config={}, total_steps=3
        )
        for step in steps:
            trackers.log(step, {"reward": value})
        trackers.finish()
        if value == 0.0:
            time.sleep(1.1)  # event files are ordered by the second in their name
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.0), (2, 1.0), (3, 1.0)]


def test_a_disk_that_takes_a_part_of_a_line_is_left_with_none_of_it(tmp_path):
    """A limit on file sizes, at which the kernel writes what still fits: a full disk does the same."""
    tracker = JsonlTracker(info(tmp_path))
    tracker.log(1, {"reward": 1})
    tracker.log(2, {"reward": 2})
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        for step in (2, 3):
            with pytest.raises(OSError, match="No space left"):
                tracker.log(step, {"length": 12345678})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tracker.log(4, {"reward": 4})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "reward": 1},
        {"step": 2, "reward": 2},
        {"step": 4, "reward": 4},
    ]


def test_wandb_offline_writes_a_run_and_a_resumed_training_goes_on_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids, logged, log = [], [], wandb.Run.log

    def watched(run, data, step=None):
        logged.append((step, data.get("reward_at_1")))
        log(run, data, step=step)

    monkeypatch.setattr(wandb.Run, "log", watched)
    for steps in ((0, 1), (2, 3), (1,)):
        trackers = build_trackers(
            ["wandb"], project="p", experiment="e", folder=tmp_path, config={"lr": 1e-6}, total_steps=3
        )
        for step in steps:
            trackers.log_samples(step, [{"prompt": "1+1=", "score": 1.0, "extra": None}])
            trackers.log(step, {"reward@1": 0.25, "note": "text"})
        trackers.finish()
        ids.append((tmp_path / "wandb_run_id").read_text())
    assert ids[0] == ids[1] != ids[2]
    assert len(list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))) == 3
    assert logged == [(step, value) for step in (0, 1, 2, 3, 1) for value in (None, 0.25)]
