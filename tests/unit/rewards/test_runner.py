"""Whatever reward functions do, every sample gets a result in time, and no process stays behind."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridflow.config.reward import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.result import RewardError
from hybridflow.rewards.runner import RewardRunner
from hybridflow.utils.errors import ConfigError

LIMIT_S = 1.0
SLACK_S = 4.0
"""Start of a replacement process on a busy machine; without the deadline the calls would take a minute or for ever."""

FILE = """
import asyncio, enum, os, re, signal, subprocess, time
import numpy as np

class Kind(str, enum.Enum):
    GOOD = "good"

class Odd:
    shape = ()
    def item(self): raise RuntimeError("no number today")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("printed by the reward function")
    if solution_str == "sleep": time.sleep(60)
    if solution_str == "loop": sum(range(10**12))
    if solution_str == "regex": re.match(r"(a+)+$", "a" * 40 + "b")
    if solution_str == "raise": raise ValueError("no such thing")
    if solution_str == "exit": raise SystemExit(3)
    if solution_str == "die": os._exit(3)
    if solution_str == "text": return "1.0"
    if solution_str.startswith("flaky"):
        with open(ground_truth, "a") as file: file.write("x")
        if os.path.getsize(ground_truth) <= int(solution_str[5:]): raise OSError("service is down")
    if solution_str == "nan": return float("nan")
    if solution_str == "odd": return Odd()
    if solution_str == "own types": return {"score": True, "kind": Kind.GOOD}
    if solution_str == "pid": return {"score": 0.0, "pid": os.getpid()}
    if solution_str == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(5); signal.alarm(0)
    if solution_str == "spawn":
        child = subprocess.Popen(["sleep", "60"])
        with open(ground_truth, "w") as file: file.write(str(child.pid))
        time.sleep(60)
    return {"score": np.float32(len(solution_str)), "extra": np.int64(7), "odd": object}

async def later(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "sleep": await asyncio.sleep(60)
    if solution_str == "loop": sum(range(10**12))
    if solution_str == "raise": raise ValueError("no such thing")
    await asyncio.sleep(0.3)
    return len(solution_str)

def hidden_async(**sample):
    return later(**sample)
"""


def sample(text, truth="1"):
    return {"data_source": "mine", "solution_str": text, "ground_truth": truth, "extra_info": {}}


@pytest.fixture
def runner_of(tmp_path):
    made = []

    def make(name="compute_score", **settings):
        (tmp_path / "reward.py").write_text(FILE)
        function = RewardFunctionConfig(path=str(tmp_path / "reward.py"), name=name)
        settings = {"timeout_s": LIMIT_S, "max_failed_share": 0.9, **settings}
        made.append(RewardRunner(RewardConfig(custom_reward_function=function, **settings)))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid, limit_s=5.0):
    end = time.monotonic() + limit_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_scores_come_in_order_with_extra_entries(runner_of):
    results = runner_of().score([sample("abc"), sample("a")])
    assert [result.score for result in results] == [3.0, 1.0]
    assert results[0].info["extra"] == 7
    assert isinstance(results[0].info["odd"], str)
    assert all(result.valid for result in results)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise", "raised ValueError: no such thing"),
        ("sleep", "no answer in 1 s"),
        ("loop", "no answer in 1 s"),
        ("regex", "no answer in 1 s"),
        ("exit", "raised SystemExit: 3"),
        ("die", "its process ended in the call .exit code 3."),
        ("nan", "the score nan is not finite"),
    ],
)
def test_a_failure_invalidates_its_sample_alone_and_in_time(runner_of, caplog, text, cause):
    runner = runner_of()
    runner.score([sample("warm up")])
    start = time.monotonic()
    results = runner.score([sample("a"), sample(text), sample("bc")])
    assert time.monotonic() - start < LIMIT_S + SLACK_S
    assert [result.valid for result in results] == [True, False, True]
    assert [results[0].score, results[2].score] == [1.0, 2.0]
    assert math.isnan(results[1].score)
    assert results[1].cause is not None
    assert re.search(cause, results[1].cause)
    assert "1 of 3 samples could not be scored; sample 1" in caplog.text


def test_the_first_traceback_is_logged(runner_of, caplog):
    runner_of().score([sample("a"), sample("raise"), sample("raise"), sample("a")])
    assert caplog.text.count("Traceback") == 1
    assert "reward.py" in caplog.text


def test_it_works_from_a_thread_and_functions_may_use_signals(runner_of):
    runner = runner_of()
    results = []

    def work():
        results.extend(runner.score([sample("alarm"), sample("loop"), sample("ab")]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert [result.valid for result in results] == [True, False, True]
    assert runner.score([sample("abc")])[0].score == 3.0, "the thread's processes live on after it"


def test_processes_are_reused_and_closed(runner_of):
    runner = runner_of()
    first, second = (int(runner.score([sample("pid")])[0].info["pid"]) for _ in range(2))
    assert first == second
    assert alive(first)
    runner.close()
    assert wait_until_gone(first)


def test_several_processes_work_at_once(runner_of):
    runner = runner_of(num_workers=2)
    results = runner.score([sample("pid") for _ in range(40)])
    assert 1 <= len({result.info["pid"] for result in results}) <= 2
    start = time.monotonic()
    runner.score([sample("sleep"), sample("sleep"), sample("a")])
    assert time.monotonic() - start < LIMIT_S + SLACK_S


def test_a_process_that_died_between_rounds_is_replaced(runner_of):
    runner = runner_of()
    pid = int(runner.score([sample("pid")])[0].info["pid"])
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid)
    assert runner.score([sample("abc")])[0].score == 3.0


def test_what_a_late_call_started_is_ended_too(runner_of, tmp_path):
    runner_of().score([sample("spawn", str(tmp_path / "pid")), sample("a")])
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


def test_too_many_failures_stop_the_run_with_the_first_traceback(runner_of):
    runner = runner_of(max_failed_share=0.5)
    assert not runner.score([sample("raise"), sample("a")])[0].valid
    with pytest.raises(RewardError, match=r"(?s)max_failed_share=0.5.*2 of 3.*sample 0: raised ValueError.*Traceback"):
        runner.score([sample("raise"), sample("a"), sample("raise")])


@pytest.mark.parametrize(("failures", "retries", "valid"), [(1, 1, True), (2, 1, False), (3, 3, True), (1, 0, False)])
def test_a_call_that_failed_is_tried_again_as_often_as_chosen(runner_of, tmp_path, failures, retries, valid):
    calls = tmp_path / "calls"
    results = runner_of(retries=retries).score([sample(f"flaky{failures}", str(calls)), sample("a")])
    assert [result.valid for result in results] == [valid, True]
    assert len(calls.read_text()) == min(failures, retries) + 1
    assert results[0].cause == (None if valid else "raised OSError: service is down")


def test_the_share_is_taken_of_the_whole_step_where_it_is_known(runner_of):
    runner = runner_of(max_failed_share=0.5)
    assert not runner.score([sample("raise")], of=2)[0].valid
    with pytest.raises(RewardError, match="max_failed_share"):
        runner.score([sample("raise")])


def test_too_many_late_calls_stop_before_all_are_tried(runner_of):
    with pytest.raises(RewardError, match=r"max_failed_share=0.1 of the step failed: at least [3-5] of 20"):
        runner_of(max_failed_share=0.1).score([sample("loop") for _ in range(20)])


def test_a_wrong_return_type_is_an_error_that_names_the_sample(runner_of):
    with pytest.raises(RewardError, match=r"returned str '1.0' for sample 1 .*'text'"):
        runner_of().score([sample("a"), sample("text")])


def test_a_file_that_cannot_be_loaded_is_an_error_with_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    function = RewardFunctionConfig(path=str(tmp_path / "broken.py"))
    runner = RewardRunner(RewardConfig(custom_reward_function=function))
    with pytest.raises(RewardError, match=r"(?s)could not be loaded: ModuleNotFoundError.*broken.py"):
        runner.score([sample("a")])


def test_async_calls_run_concurrently(runner_of):
    runner = runner_of("later")
    runner.score([sample("a")])
    start = time.monotonic()
    results = runner.score([sample("x" * i) for i in range(100)])
    assert [result.score for result in results] == list(range(100))
    assert time.monotonic() - start < 0.5 * 100 * 0.3, "one after the other takes 30 s"


def test_async_failures_stay_alone_even_when_one_blocks_the_loop(runner_of):
    texts = ["a", "sleep", "bc", "loop", "raise", "def"]
    results = runner_of("later", num_workers=2).score([sample(text) for text in texts])
    assert [result.valid for result in results] == [True, False, True, False, False, True]


def test_a_plain_function_that_gives_an_awaitable_is_awaited(runner_of):
    assert runner_of("hidden_async").score([sample("abc")])[0].score == 3.0


def test_large_samples_to_a_deaf_process_do_not_block(runner_of):
    """A socket holds about 200 kB; a child in an endless loop reads none of it."""
    start = time.monotonic()
    results = runner_of("later", timeout_s=1.0).score([sample("loop")] + [sample("x" * 50_000) for _ in range(10)])
    assert [result.valid for result in results] == [False] + [True] * 10
    assert time.monotonic() - start < 60


def test_the_cheap_built_in_scorers_start_no_process():
    runner = RewardRunner(RewardConfig())
    builtin = [{**sample(text, "42"), "data_source": "hybridflow/arithmetic"} for text in ("42", "41", "")]
    assert [result.score for result in runner.score(builtin)] == [1.0, 0.0, 0.0]
    assert runner._processes == []


def test_a_bad_ground_truth_fails_in_the_cheap_scorers_too():
    good, bad = ({**sample("42", truth), "data_source": "hybridflow/arithmetic"} for truth in ("42", ""))
    results = RewardRunner(RewardConfig()).score([good, bad])
    assert [result.valid for result in results] == [True, False]
    assert "bad data" in results[1].cause


def test_mixed_sources_go_to_their_own_scorers():
    runner = RewardRunner(RewardConfig())
    rows = [("hybridflow/arithmetic", "42", "42"), ("math", r"\boxed{1/2}", "0.5"), ("openai/gsm8k", "#### 3", "4")]
    samples = [{**sample(text, truth), "data_source": source} for source, text, truth in rows]
    assert [result.score for result in runner.score(samples)] == [1.0, 1.0, 0.0]
    runner.close()


def test_an_unknown_source_is_an_error():
    with pytest.raises(ConfigError, match="no built-in scorer"):
        RewardRunner(RewardConfig()).score([sample("a")])


def test_nothing_to_score_gives_nothing():
    assert RewardRunner(RewardConfig()).score([]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_end_when_their_parent_is_killed_in_the_middle_of_a_call(tmp_path):
    (tmp_path / "reward.py").write_text(
        "import os\n"
        "def compute_score(ground_truth, **sample):\n"
        "    open(ground_truth + '.new', 'w').write(str(os.getpid())); os.rename(ground_truth + '.new', ground_truth)\n"
        "    sum(range(10**12))\n"
    )
    code = (
        "from hybridflow.config.reward import *\nfrom hybridflow.rewards.runner import RewardRunner\n"
        f"f = RewardFunctionConfig(path={str(tmp_path / 'reward.py')!r})\n"
        f"s = dict(data_source='x', solution_str='', ground_truth={str(tmp_path / 'pid')!r}, extra_info={{}})\n"
        "RewardRunner(RewardConfig(custom_reward_function=f, timeout_s=60)).score([s])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        end = time.monotonic() + 30
        while not (tmp_path / "pid").exists() and time.monotonic() < end:
            time.sleep(0.02)
        child = int((tmp_path / "pid").read_text())
        assert alive(child)
        parent.kill()
    assert wait_until_gone(child)


def test_types_of_the_users_own_come_as_text_and_do_no_harm(runner_of):
    """The run has none of them: it could not read them."""
    whole, failed = runner_of(max_failed_share=0.5).score([sample("own types"), sample("odd")])
    assert whole.score == 1.0 and whole.info == {"kind": "<Kind.GOOD: 'good'>"}
    assert not failed.valid and failed.cause == "raised RuntimeError: no number today"
