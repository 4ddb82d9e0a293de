"""``RewardRunner``: samples in, a ``Result`` each out, whatever the reward functions do.

Every call has a deadline. It runs in a process of its own (several, for several at a time) that is ended and replaced
when the deadline passes, so an endless loop inside C stops nothing. A call that raises or is late marks its sample
invalid; it is never scored 0. The few built-in scorers that only compare strings run right here.
"""

from __future__ import annotations

import logging
import multiprocessing.connection
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.rewards.child import Outcome, outcome_of_call
from hybridflow.rewards.process import RewardProcess
from hybridflow.rewards.registry import find_scorer, score_by_data_source
from hybridflow.rewards.result import Result, RewardError, failed

logger = logging.getLogger(__name__)

Sample = Mapping[str, Any]
"""``data_source``, ``solution_str``, ``ground_truth``, ``extra_info``: what a reward function is called with."""


class RewardRunner:
    """Scores samples under ``reward.*``. Its processes start at the first need and are kept; any thread may use it."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._processes: list[RewardProcess] = []

    def score(self, samples: Sequence[Sample], *, of: int | None = None) -> list[Result]:
        """Results in the order of ``samples``, which are a share of ``of`` samples in the step (None: all of them).

        Raises:
            RewardError: a function returned something that is no score (names the sample), its file cannot be loaded,
                or more than ``reward.max_failed_share`` of the samples failed (said as soon as it is sure).
            ConfigError: a data source without scorer.
        """
        with self._lock:
            outcomes: dict[int, Outcome] = {}
            elsewhere = []
            for number, sample in enumerate(samples):
                if self._runs_here(sample):
                    outcomes[number] = outcome_of_call(score_by_data_source, sample)
                else:
                    elsewhere.append(number)
            if elsewhere:
                tolerated = self._config.max_failed_share * (of or len(samples)) - len(_failures(outcomes))
                outcomes |= _Round(self._config, self._processes, samples, elsewhere, tolerated).run()
        self._judge(samples, outcomes, of or len(samples))
        return [_as_result(outcomes[number]) for number in range(len(samples))]

    def close(self) -> None:
        """Ends its processes."""
        with self._lock:
            for process in self._processes:
                process.kill()
            self._processes.clear()

    def _runs_here(self, sample: Sample) -> bool:
        if self._config.custom_reward_function.path is not None:
            return False
        return find_scorer(sample["data_source"]).in_process

    def _judge(self, samples: Sequence[Sample], outcomes: Mapping[int, Outcome], of: int) -> None:
        for number, outcome in outcomes.items():
            if outcome[0] == "no score":
                raise RewardError(
                    f"the reward function returned {outcome[1]} for sample {number} (data_source "
                    f"{samples[number]['data_source']!r}, response {str(samples[number]['solution_str'])[:80]!r}): "
                    "a number, or a dict with a number under 'score', is expected"
                )
        failures = _failures(outcomes)
        if not failures:
            return
        number = min(failures)
        _, cause, trace = outcomes[number]
        told = f"{len(failures)} of {len(samples)} samples could not be scored; sample {number}: {cause}\n{trace}"
        if len(failures) > self._config.max_failed_share * of:
            share = self._config.max_failed_share
            raise RewardError(f"more than reward.max_failed_share={share:g} of the step failed: at least {told}")
        logger.warning("%s", told.rstrip())


class _Round:
    """One batch of calls in the processes: hands out, collects, ends what is overdue."""

    def __init__(
        self,
        config: RewardConfig,
        processes: list[RewardProcess],
        samples: Sequence[Sample],
        numbers: Sequence[int],
        tolerated: float,
    ) -> None:
        self._config = config
        self._processes = processes
        self._samples = samples
        self._waiting = deque(numbers)
        self._alone: deque[int] = deque()
        """Calls that failed, or shared a process with a late one: tried again, each with a process to itself."""
        self._calls = len(numbers)
        self._tolerated = tolerated
        self._scorers: tuple[str, ...] = ()
        if config.custom_reward_function.path is None:
            self._scorers = tuple({find_scorer(samples[number]["data_source"]).target: None for number in numbers})
        self._outcomes: dict[int, Outcome] = {}
        self._tries: Counter[int] = Counter()

    def run(self) -> dict[int, Outcome]:
        """The outcome of every call, or of those until more failed than are tolerated."""
        try:
            while len(self._outcomes) < self._calls and len(_failures(self._outcomes)) <= self._tolerated:
                self._hand_out()
                self._collect()
                self._end_overdue()
        finally:
            # A call that is given up must not answer into the next round.
            for process in [process for process in self._processes if process.running]:
                self._processes.remove(process)
                process.kill()
        return self._outcomes

    def _hand_out(self) -> None:
        for process in [process for process in self._processes if not process.running and process.has_ended]:
            self._processes.remove(process)
            process.kill()
        wanted = min(self._config.num_workers, len(self._waiting) + len(self._alone) + self._busy())
        while len(self._processes) < wanted:
            self._processes.append(RewardProcess(self._config, self._scorers))
        for process in self._processes:
            while process.capacity > 0 and self._waiting:
                self._start(process, self._waiting.popleft())
            if self._alone and not process.running:
                self._start(process, self._alone.popleft())

    def _start(self, process: RewardProcess, number: int) -> None:
        process.submit(number, self._samples[number])

    def _collect(self) -> None:
        connections = {process.connection: process for process in self._processes if process.running}
        overdue = min(min(process.running.values()) for process in connections.values())
        patience_s = max(0.0, overdue - time.monotonic())
        for connection in multiprocessing.connection.wait(list(connections), patience_s):
            process = connections[connection]  # type: ignore[index]
            try:
                number, outcome = process.connection.recv()
            except (EOFError, OSError):
                self._end(process, f"its process ended in the call (exit code {process.await_end()})")
                continue
            del process.running[number]
            self._keep(number, outcome)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for process in list(self._processes):
            if process.running and min(process.running.values()) <= now and not process.connection.poll():
                self._end(process, f"no answer in {self._config.timeout_s:g} s")

    def _end(self, process: RewardProcess, cause: str) -> None:
        """Ends a process. A call that was alone in it is to blame; of several, each gets another try by itself."""
        self._processes.remove(process)
        process.kill()
        calls = list(process.running)
        if len(calls) > 1:
            self._alone.extend(calls)
            return
        for number in calls:
            self._keep(number, ("raised", cause, ""))

    def _keep(self, number: int, outcome: Outcome) -> None:
        """The outcome of a call, unless it failed and may be tried again."""
        self._tries[number] += 1
        if outcome[0] == "raised" and self._tries[number] <= self._config.retries:
            self._alone.append(number)
        else:
            self._outcomes[number] = outcome

    def _busy(self) -> int:
        return sum(len(process.running) for process in self._processes)


def _failures(outcomes: Mapping[int, Outcome]) -> list[int]:
    return [number for number, outcome in outcomes.items() if outcome[0] != "scored"]


def _as_result(outcome: Outcome) -> Result:
    if outcome[0] == "scored":
        return Result(score=outcome[1], info=outcome[2])
    return failed(str(outcome[1]))
