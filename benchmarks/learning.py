"""Does every estimator learn? The default arithmetic job with each of them, accuracy on held-out sums before and after.

One rank in one process (``trainer.controller=local``), the default generator, one seed: a check that nothing is
broken, not a ranking of algorithms. Usage:

    python benchmarks/learning.py [--only gae rloo] [--seed 1] [--out benchmarks/results] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("preset=grpo",),
    "gae": ("preset=ppo",),
    "rloo": ("preset=rloo",),
    "reinforce_plus_plus": ("preset=reinforce_plus_plus",),
    "remax": ("preset=remax",),
}
"""What is added to the default job."""
COMMON = (
    "trainer.controller=local",
    "trainer.device=cpu",
    "trainer.logger=[jsonl]",
    "trainer.resume_mode=disable",
)
SAMPLED = "val-core/hybridflow/arithmetic/reward/mean_at_1"
GREEDY = "val-core/hybridflow/arithmetic/greedy/mean_at_1"


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    name: str
    overrides: tuple[str, ...]
    steps: int
    seconds: float
    sampled: tuple[float, float]
    greedy: tuple[float, float]

    @property
    def learned(self) -> bool:
        """Whether sampled accuracy rose by more than its noise: 256 questions have a standard error of up to 0.03."""
        return self.sampled[1] - self.sampled[0] > 0.1


def run(name: str, seed: int, extra: tuple[str, ...]) -> Outcome:
    """One job in a process of its own."""
    overrides = (*RUNS[name], *COMMON, f"trainer.seed={seed}", *extra)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-m", "hybridflow.main_ppo", *overrides, f"trainer.default_local_dir={folder}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        seconds = time.perf_counter() - started
        steps = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    first, last = steps[0], steps[-1]
    return Outcome(
        name=name,
        overrides=overrides,
        steps=last["step"],
        seconds=seconds,
        sampled=(first[SAMPLED], last[SAMPLED]),
        greedy=(first[GREEDY], last[GREEDY]),
    )


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    lines = [
        "| estimator | sampled accuracy | greedy accuracy | steps | seconds | learned |",
        "|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        sampled, greedy = (f"{first:.3f} -> {last:.3f}" for first, last in (o.sampled, o.greedy))
        learned = "yes" if o.learned else "**no**"
        lines.append(f"| {o.name} | {sampled} | {greedy} | {o.steps} | {o.seconds:.0f} | {learned} |")
    return "\n".join(lines)


def main() -> int:
    """1 when an estimator did not learn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder of results; without it they are only printed")
    arguments, extra = parser.parse_known_args()
    outcomes = []
    for name in arguments.only:
        outcomes.append(run(name, arguments.seed, tuple(extra)))
        print(table(outcomes[-1:]).splitlines()[-1], flush=True)
    found = table(outcomes)
    if arguments.out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        lines = [
            f"# Does every estimator learn? ({date.today().isoformat()})\n",
            found,
            "\nHeld-out sums of the embedded arithmetic task, one seed, one CPU rank. Seconds are of the whole process",
            "on a machine that others were using: no measure of speed.\n",
            f"- machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            f"- commit: {commit.stdout.strip()}",
            f"- command: `{' '.join(['python', 'benchmarks/learning.py', *sys.argv[1:]])}`\n",
            "Overrides of the default job:\n",
            *(f"- {o.name}: `{' '.join(o.overrides)}`" for o in outcomes),
        ]
        arguments.out.mkdir(parents=True, exist_ok=True)
        file = arguments.out / f"learning-{date.today().isoformat()}.md"
        file.write_text("\n".join(lines) + "\n")
        print(file)
    return 0 if all(outcome.learned for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
