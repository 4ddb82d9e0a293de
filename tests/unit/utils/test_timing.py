from __future__ import annotations

import pytest

from hybridflow.utils.timing import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_entered_twice_is_summed_and_take_starts_anew():
    clock = Clock()
    watch = Stopwatch(clock)
    for seconds in (1.0, 2.5):
        with watch.phase("gen"):
            clock.now += seconds
    assert watch.seconds == {"gen": 3.5}
    assert watch.take() == {"timing_s/gen": 3.5}
    assert watch.take() == {}


def test_nested_phases_each_count_their_own_inside():
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.phase("step"):
        with watch.phase("adv"):
            clock.now += 1
        clock.now += 2
    assert watch.seconds == {"adv": 1.0, "step": 3.0}


def test_a_phase_that_raises_is_still_counted():
    clock = Clock()
    watch = Stopwatch(clock)
    with pytest.raises(ZeroDivisionError), watch.phase("ref"):
        clock.now += 4
        raise ZeroDivisionError
    assert watch.seconds == {"ref": 4.0}
