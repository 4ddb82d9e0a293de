"""When a call counts as stalled, who is a straggler, and where a silent rank stands."""

from __future__ import annotations

import pytest

from hybridflow.single_controller.pace import Pace, stands_at

LANE = '  File "/x/hybridflow/single_controller/host.py", line 206 in execute\n'
IDLE = 'Thread 0x1 (most recent call first):\n  File "/usr/lib/threading.py", line 1 in wait\n'


def paced(*seconds: float) -> Pace:
    pace = Pace()
    for value in seconds:
        pace.took("gen", {0: value, 1: value})
    return pace


def test_an_unknown_method_stalls_at_half_of_its_deadline():
    assert paced().stalls_after_s("gen", 3600.0) == 1800.0
    assert paced(1.0, 1.0).stalls_after_s("gen", 3600.0) == 1800.0


@pytest.mark.parametrize(
    ("usual", "deadline", "stall"), [(1.0, 3600.0, 30.0), (20.0, 3600.0, 100.0), (20.0, 60.0, 30.0)]
)
def test_a_known_one_stalls_at_five_times_its_usual_time(usual, deadline, stall):
    assert paced(usual, usual, usual).stalls_after_s("gen", deadline) == stall


def test_one_slow_call_does_not_make_slowness_usual():
    assert paced(1.0, 1.0, 500.0).usual_s("gen") == 1.0


def test_a_straggler_is_named_once_for_a_method():
    pace = Pace()
    assert pace.took("gen", {0: 2.0, 1: 2.2, 2: 9.0}) == (2, 9.0, pytest.approx(2.1))
    assert pace.took("gen", {0: 2.0, 1: 2.2, 2: 9.0}) is None
    assert pace.took("update", {0: 2.0, 1: 9.0, 2: 2.0}) == (1, 9.0, 2.0)


@pytest.mark.parametrize("seconds", [{0: 2.0, 1: 2.5}, {0: 0.1, 1: 0.9}, {0: 5.0}])
def test_even_ranks_short_calls_and_single_ranks_have_no_straggler(seconds):
    assert Pace().took("gen", seconds) is None


def test_the_ratio_is_the_worst_since_it_was_asked():
    pace = Pace()
    pace.took("gen", {0: 1.0, 1: 1.0, 2: 3.0})
    pace.took("gen", {0: 1.0, 1: 1.0, 2: 1.0})
    assert pace.take_ratios() == {"gen": 3.0}
    assert pace.take_ratios() == {}


def test_the_work_lane_is_found_and_a_wait_for_peers_is_told_from_own_work():
    own = 'Thread 0x2 (most recent call first):\n  File "/home/me/reward.py", line 7 in score\n' + LANE
    assert stands_at(f"{IDLE}\n{own}") == ('File "/home/me/reward.py", line 7 in score', False)
    waits = f'Thread 0x2 (most recent call first):\n  File "/v/torch/distributed/c.py", line 9 in all_reduce\n{LANE}'
    assert stands_at(f"{IDLE}\n{waits}") == ('File "/v/torch/distributed/c.py", line 9 in all_reduce', True)
    assert stands_at(IDLE) == ("outside any call", False)
