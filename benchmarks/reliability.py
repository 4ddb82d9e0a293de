"""What watching and checkpoints cost a step, on the default job or on SmolLM2.

    python benchmarks/reliability.py [--steps 10] [--smollm2 FOLDER] [--out benchmarks/results] [KEY=VALUE ...]

Watchdog and deadlines: the job runs with a clock around everything that the driver does only to notice deaths, stalls,
stragglers and deadlines; the sum over the time of the steps is the share. (Two runs with and without it would differ by
more than it: steps of one job vary by several percent.) Checkpoints: ``async_save`` behind every second step of one
job. What is written beside the step that follows a save makes that step longer than its neighbours, which have nothing
beside them; the difference, and what the run waited at the save, is the cost of one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM = 2
"""First steps, which are left out."""
SAVING = (
    "trainer.save_freq=2",
    "actor_rollout_ref.actor.checkpoint.async_save=True",
    "trainer.max_actor_ckpt_to_keep=2",
)
CLOCK = "watching.json"
SMOLLM2 = (
    "data.train_files=['reasoning_gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2']",
    "data.val_files=['reasoning_gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2']",
    "data.generated_size=512",
    "data.train_batch_size=16",
    "data.max_prompt_length=128",
    "data.max_response_length=32",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096",
    "trainer.test_freq=-1",
)
"""The batch of examples/smollm2_arithmetic."""


@dataclass
class Clock:
    """Seconds inside watched functions, nested ones once."""

    seconds: float = 0.0
    calls: int = 0
    depth: int = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.seconds += time.perf_counter() - begun
                    self.calls += 1

        return timed


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """Puts the clock around what only watching needs."""
    from hybridflow.single_controller import health, lanes, pace, ray_group
    from hybridflow.trainer.run import Run

    health.death_elsewhere = clock.around(health.death_elsewhere)
    lanes.LaneGroup._note_pace = clock.around(lanes.LaneGroup._note_pace)
    lanes.LaneGroup.stragglers = clock.around(lanes.LaneGroup.stragglers)
    pace.Pace.stalls_after_s = clock.around(pace.Pace.stalls_after_s)
    ray_group._Actors.deaths = clock.around(ray_group._Actors.deaths)
    fit_begun: list[float] = []
    step = Run.step

    @contextmanager
    def counting(run: Run, number: int) -> Iterator[None]:
        if number == WARM + 1:
            clock.seconds, clock.calls = 0.0, 0
            fit_begun.append(time.perf_counter())
        with step(run, number):
            yield
        if number == run.total_steps:
            seconds = time.perf_counter() - fit_begun[0]
            steps = number - WARM
            found = {"seconds": clock.seconds, "calls": clock.calls / steps, "share": clock.seconds / seconds}
            (Path(run.config.trainer.default_local_dir) / CLOCK).write_text(json.dumps(found))

    Run.step = counting
    yield


def job(folder: Path, steps: int, *extra: str) -> list[dict[str, Any]]:
    """Lines of the measured steps of the default job, in a process of its own."""
    common = (f"trainer.total_training_steps={steps}", "trainer.val_before_train=False", "trainer.logger=[jsonl]")
    command = [sys.executable, str(Path(__file__)), "--inside", *common, f"trainer.default_local_dir={folder}", *extra]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > WARM]


def seconds_of(rows: list[dict[str, Any]], *, behind_a_save: bool) -> list[float]:
    """What each step took, of those that have a checkpoint being written beside them, or of the others."""
    return [row["timing_s/step"] for row in rows if (row["step"] % 2 == 1) is behind_a_save]


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in seconds) + " s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12, help="an even number")
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2: its job in place of the default one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    asked, extra = parser.parse_known_args()
    if asked.smollm2 is not None:
        extra = [f"actor_rollout_ref.model.path={asked.smollm2}", *SMOLLM2, *extra]
    with tempfile.TemporaryDirectory() as temporary:
        rows = job(Path(temporary), asked.steps, *SAVING, *extra)
        watching = json.loads((Path(temporary) / CLOCK).read_text())
    without, beside = seconds_of(rows, behind_a_save=False), seconds_of(rows, behind_a_save=True)
    waits = [row["timing_s/save_checkpoint"] for row in rows if row["step"] % 2 == 0]
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    share, looks = 100 * watching["share"], watching["calls"]
    before, after, wait = (statistics.median(seconds) for seconds in (without, beside, waits))
    added = after - before + wait
    name, goal = ("default", "at most 0.3 s") if asked.smollm2 is None else ("smollm2", "at most 10 %")
    text = f"""# What watching and saving cost

- Command: `python benchmarks/reliability.py {" ".join(sys.argv[1:])}`; commit {commit}
- Machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},
  OMP_NUM_THREADS={os.environ.get("OMP_NUM_THREADS", "unset")}; load before: {os.getloadavg()[0]:.1f}
- The {name} job (GRPO, one FSDP2 worker, vLLM rollout, Ray), steps {WARM + 1} to {asked.steps}.

| | measured | asked for |
|---|---|---|
| watchdog and deadlines, share of a step | {share:.3f} % ({looks:.0f} looks a step) | at most 1 % |
| median step with nothing beside it | {before:.3f} s | |
| median step with a checkpoint written beside it | {after:.3f} s | |
| median wait at a save | {wait:.3f} s | |
| added by a checkpoint behind every step | {added:+.3f} s ({100 * added / before:+.1f} %) | {goal} |

Steps with nothing beside them: {_listed(without)}; with a checkpoint: {_listed(beside)}; waits: {_listed(waits)}.
"""
    path = asked.out / f"{date.today()}_reliability_{name}.md"
    path.write_text(text)
    print(text, path, sep="\n")


def inside() -> int:
    """The job itself, watched."""
    from hybridflow.cli.ppo import main as main_ppo

    with watched(Clock()):
        return main_ppo(sys.argv[2:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        raise SystemExit(inside())
    main()
