from __future__ import annotations

import io
import logging
import re
import time

from rich.console import Console

from hybridflow.trainer.progress import ConsoleTracker, StartUp, final_lines
from hybridflow.trainer.tracking import RunInfo
from hybridflow.utils.logging import set_up

STEP = {
    "training/global_step": 2,
    "critic/score/mean": 0.5,
    "actor/ppo_kl": 0.0123,
    "response_length/mean": 7.5,
    "perf/throughput": 12345.6,
    "perf/time_per_step": 2.0,
}


def console(tmp_path, *, terminal):
    stream = io.StringIO()
    info = RunInfo(project="p", experiment="e", folder=tmp_path, config={}, total_steps=30)
    shown = Console(file=stream, force_terminal=terminal, width=160, highlight=False, soft_wrap=True)
    return ConsoleTracker(info, shown), stream


def test_without_a_terminal_each_step_is_one_plain_line(tmp_path):
    tracker, stream = console(tmp_path, terminal=False)
    tracker.log(2, STEP)
    tracker.finish()
    assert stream.getvalue() == (
        "step 2/30  reward 0.500  kl 0.0123  length 7.5  tok/s 12,346  s/step 2.00  eta 0:56\n"
    )


def test_on_a_terminal_the_steps_share_one_live_line(tmp_path):
    tracker, stream = console(tmp_path, terminal=True)
    for step in (1, 2):
        tracker.log(step, {**STEP, "training/global_step": step})
    tracker.finish()
    tracker.finish()
    text = stream.getvalue()
    assert "2/30" in text
    assert "reward 0.500" in text
    assert "\x1b[?25h" in text, "the cursor must come back"


def test_a_validation_is_a_line_of_its_own_and_brackets_are_text(tmp_path):
    tracker, stream = console(tmp_path, terminal=False)
    tracker.log(0, {"val-core/arithmetic/reward/mean_at_1": 0.25})
    tracker.log_samples(0, [{"prompt": "[bold]1+1=", "score": 1.0}])
    assert stream.getvalue() == (
        "validation at step 0: arithmetic/reward/mean_at_1 0.250\nsample at step 0: prompt: '[bold]1+1=' | score: 1.0\n"
    )


def test_the_start_up_table_begins_at_process_start_and_sums_repeated_phases():
    start = StartUp()
    for _ in range(2):
        with start.phase("load model"):
            time.sleep(0.01)
    assert start.seconds["python and imports"] > 0
    assert start.seconds["load model"] >= 0.02
    stream = io.StringIO()
    Console(file=stream, width=80).print(start.table())
    assert "load model" in stream.getvalue()
    assert "all phases" in stream.getvalue()


def test_the_final_lines_say_from_what_to_what_and_where():
    found = final_lines(
        {"val-core/a/reward/mean@1": 0.25},
        {"val-core/a/reward/mean@1": 0.55, "val-core/a/greedy/mean@1": 0.9, "val-aux/failed": 0.0},
        folder="outputs/x",
        try_next=["python -m hybridflow.main_ppo --dry-run"],
    )
    assert found == [
        "a/reward/mean_at_1: 0.250 -> 0.550 (+0.300)",
        "a/greedy/mean_at_1: 0.900",
        "outputs: outputs/x",
        "try next:",
        "  python -m hybridflow.main_ppo --dry-run",
    ]


def test_a_narrow_terminal_keeps_the_numbers_and_drops_the_bar(tmp_path):
    for width, bar in ((80, False), (120, True)):
        stream = io.StringIO()
        info = RunInfo(project="p", experiment="e", folder=tmp_path, config={}, total_steps=320)
        tracker = ConsoleTracker(info, Console(file=stream, force_terminal=True, width=width, soft_wrap=True))
        tracker.log(2, STEP)
        tracker.finish()
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
        assert "  2/320" in shown and "eta 10:36" in shown
        assert ("━" in shown) == bar


def test_a_log_line_goes_where_the_live_line_says(tmp_path, capsys):
    set_up()
    info = RunInfo(project="p", experiment="e", folder=tmp_path, config={}, total_steps=30)
    stream = io.StringIO()
    tracker = ConsoleTracker(info, Console(file=stream, force_terminal=True, width=120, soft_wrap=True))
    tracker.log(2, STEP)
    logging.getLogger("hybridflow.trainer.saving").warning("saved")
    tracker.finish()
    logging.getLogger("hybridflow").handlers = []
    assert "hybridflow.trainer.saving: saved" in stream.getvalue()
    assert capsys.readouterr().err == ""
