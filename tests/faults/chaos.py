"""A run that everything happens to, from one seed: kills at random moments, disks, rewards and checkpoints that fail.

    python -m tests.faults.chaos FOLDER --seed 11 --steps 42 --worker 9 --driver 4 --full-disk 1 ...
    python -m tests.faults.chaos FOLDER --seed 12 --steps 18 --node 3 --ray-worker 3 --ray-driver 1
    python -m tests.faults.chaos FOLDER --seed 13 --steps 20 --rollout vllm --worker 7 --driver 3

The command is started again whenever it ends before its last step, as an operator or scheduler would; a worker's death
it must survive by itself. In the end weights, moments and metrics equal those of a run that nobody disturbed, and a
ledger made of the samples that were written accounts for every prompt exactly once an epoch.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hybridflow.single_controller import health
from hybridflow.trainer.checkpoint import CheckpointStore
from tests.faults.job import start_job
from tests.faults.nodes import Nodes, two_nodes
from tests.invariants.test_resume import lines, tensors
from tests.jobs import run_job

PROMPTS, BATCH, SAMPLES = 24, 4, 2
"""Of the data set, of a step, of a prompt: an epoch is six steps."""
REWARD_DEADLINE_S = 15.0
DISK_BYTES = 1 << 20
"""More than the metrics of a run, less than a checkpoint."""
STUCK_S = 240.0
RAY = ("node", "ray worker", "ray driver")
FAULTS = ("worker", "driver", "slow reward", "nan reward", "full disk", "damaged checkpoint", *RAY)


def job_options(orders: Path, steps: int, rollout: str) -> dict[str, Any]:
    """The job: two ranks, a checkpoint every step, written while training goes on; ``rollout`` generates."""
    return {
        "actor_rollout_ref.rollout.name": rollout,
        "data.train_batch_size": BATCH,
        "data.generated_size": PROMPTS,
        "data.generated_val_size": 8,
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.shuffle": True,
        "actor_rollout_ref.actor.optim.lr": 2e-4,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
        "actor_rollout_ref.actor.checkpoint.async_save": True,
        "reward.custom_reward_function.path": str(Path(__file__).with_name("chaos_reward.py")),
        "reward.custom_reward_function.reward_kwargs": {"orders": str(orders)},
        "reward.timeout_s": 600,
        "reward.max_failed_share": 0.0,
        "trainer.timeouts.reward_s": REWARD_DEADLINE_S,
        "trainer.n_gpus_per_node": 2,
        "trainer.threads_per_worker": 1,
        "trainer.total_training_steps": steps,
        "trainer.save_freq": 1,
        "trainer.max_actor_ckpt_to_keep": 3,
        "trainer.test_freq": 5,
        "trainer.max_restarts": 1000,
        "trainer.restart_backoff_s": 0.2,
    }


@dataclass
class Chaos:
    """One disturbed run."""

    folder: Path
    seed: int
    steps: int
    nodes: Nodes | None = None
    rollout: str = "hf"
    log: list[str] = field(default_factory=list)
    starts: int = 0
    suffered: Counter[str] = field(default_factory=Counter)
    ends: list[int] = field(default_factory=list)
    """Exit codes of the command, as it ended by itself."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.run_folder = self.folder / "chaos"
        self.orders = self.folder / "orders"
        self.orders.mkdir(parents=True, exist_ok=True)
        self.output = self.folder / "output.txt"
        self.began = time.monotonic()
        self.job: subprocess.Popen[str] | None = None

    # -------------------------------------------------------------------------------------------------- the command

    def start(self) -> None:
        """Starts the command, on Ray while nodes are part of it."""
        options = job_options(self.orders, self.steps, self.rollout)
        options["trainer.rollout_data_dir"] = self.run_folder / "samples"
        if self.nodes is not None:
            options |= {"trainer.controller": "ray", "trainer.nnodes": 2, "trainer.n_gpus_per_node": 1}
            options["ray_kwargs.ray_init.address"] = self.nodes.address
        if self.job is not None and self.job.returncode is not None:
            self.ends.append(self.job.returncode)
        with self.output.open("a") as output:
            self.job = start_job(
                self.run_folder, options, output=output, environment=None if self.nodes is None else self.nodes.token
            )
        self.starts += 1

    def alive(self) -> bool:
        """Whether the command runs."""
        assert self.job is not None
        return self.job.poll() is None

    def done(self) -> bool:
        """Whether the command ended behind its last step."""
        return self.job is not None and self.job.poll() == 0

    def lines(self) -> int:
        """Steps that are logged."""
        path = self.run_folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def ranks(self) -> list[int]:
        """Processes that host workers."""
        if self.nodes is not None:
            everyone = [*self.nodes.processes("head"), *self.nodes.processes("worker")]
            return [pid for pid in everyone if _title(pid).startswith("ray::RankActor")]
        assert self.job is not None
        return [pid for pid in health.descendants([self.job.pid]) if _forked_rank(pid)]

    # ------------------------------------------------------------------------------------------------------- faults

    def suffer(self, faults: Sequence[str]) -> None:
        """Starts the command, and all of ``faults`` happen to it."""
        self.start()
        for fault in faults:
            self.wait_for_a_moment()
            if not self.alive():
                assert not self.done(), f"the run was over before {fault}: give it more steps\n{self.tail()}"
                self.start()
                self.wait_for_a_moment()
            self.suffered[fault] += 1
            self.note(f"{self.suffered.total():>2}. {fault}, behind line {self.lines()}")
            getattr(self, f"do_{fault.replace(' ', '_')}")()

    def finish(self) -> None:
        """To the last step, started again as often as it takes."""
        until = time.monotonic() + 2 * STUCK_S
        while not self.done():
            assert time.monotonic() < until, self.tail()
            if not self.alive():
                self.start()
            time.sleep(0.1)
        said = self.said("(trainer.max_restarts)")
        self.note(f"done: {self.starts} starts of the command (it ended by {self.ends}), {said} restarts by itself")

    def wait_for_a_moment(self) -> None:
        """Up to two more steps and up to a second more: also while it starts, restarts, validates, saves."""
        more, goal = self.random.choice([0, 1, 1, 2]), self.lines()
        pause = self.random.uniform(0.0, 1.5)
        until = time.monotonic() + STUCK_S
        while self.lines() < min(goal + more, self.steps - 1) and self.alive():
            assert time.monotonic() < until, self.tail()
            time.sleep(0.01)
        time.sleep(pause)

    def do_worker(self) -> None:
        """kill -9 on a rank; when none stands yet, as soon as one does."""
        until = time.monotonic() + STUCK_S
        while not (ranks := self.ranks()):
            assert time.monotonic() < until, self.tail()
            if not self.alive():
                return self.note("    the command ended before it had ranks")
            time.sleep(0.02)
        health.kill([self.random.choice(sorted(ranks))])
        return None

    do_ray_worker = do_worker

    def do_driver(self) -> None:
        """kill -9 on the command; its ranks must end with it."""
        assert self.job is not None
        children = health.descendants([self.job.pid])
        self.job.kill()
        self.job.wait()
        assert health.wait_gone(children, timeout_s=20.0) == [], "a process outlived its driver"
        self.start()

    def do_ray_driver(self) -> None:
        """The same on a cluster that lives on: Ray ends the ranks."""
        assert self.job is not None
        ranks = self.ranks()
        self.job.kill()
        self.job.wait()
        assert health.wait_gone(ranks, timeout_s=30.0) == [], "a rank outlived its driver"
        self.start()

    def do_node(self) -> None:
        """All processes of the second node at once; it comes back some seconds later."""
        assert self.nodes is not None
        self.nodes.kill("worker")
        time.sleep(self.random.uniform(0.0, 4.0))
        self.nodes.start("worker")
        self.nodes.ready("worker")

    def do_slow_reward(self) -> None:
        """A reward that never answers: its deadline passes, and the command starts again by itself."""
        before = self.said("passed its deadline")
        (self.orders / "slow").touch()
        self.wait_until(lambda: self.said("passed its deadline") > before)

    def do_nan_reward(self) -> None:
        """A reward that is no number: no sample may fail here, so the command ends before it learns from the step."""
        (self.orders / "nan").touch()
        self.wait_until(lambda: not self.alive())
        assert self.job is not None and self.job.returncode == 1, self.tail()

    def do_full_disk(self) -> None:
        """No file of the command may grow: its next checkpoint is refused and it ends (code 3)."""
        assert self.job is not None
        limited: set[int] = set()

        def refused() -> bool:
            for pid in {self.job.pid, *self.ranks()} - limited:  # type: ignore[union-attr]
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (DISK_BYTES, resource.RLIM_INFINITY))
                    limited.add(pid)
            return not self.alive()

        self.wait_until(refused)
        self.note(f"    ended with code {self.job.returncode}")

    def do_damaged_checkpoint(self) -> None:
        """The command is killed, and of its newest checkpoint a file is cut short."""
        assert self.job is not None
        self.wait_until(lambda: CheckpointStore(self.run_folder)._steps() != [])
        children = health.descendants([self.job.pid])
        self.job.kill()
        self.job.wait()
        health.wait_gone(children, timeout_s=20.0)
        newest = self.run_folder / f"global_step_{max(CheckpointStore(self.run_folder)._steps())}"
        victim = self.random.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
        victim.write_bytes(victim.read_bytes()[:-1])
        self.note(f"    {victim.relative_to(self.run_folder)} is cut short")
        self.start()

    # ------------------------------------------------------------------------------------------------------ helpers

    def wait_until(self, claim: Callable[[], bool]) -> None:
        """Until ``claim`` holds."""
        until = time.monotonic() + STUCK_S
        while not claim():
            assert time.monotonic() < until, self.tail()
            time.sleep(0.05)

    def said(self, words: str) -> int:
        """How often the output has ``words``."""
        return self.output.read_text().count(words)

    def tail(self) -> str:
        """The end of the output."""
        return "\n".join([*self.log, self.output.read_text()[-6000:]])

    def note(self, text: str) -> None:
        """A line of the log."""
        line = f"{time.monotonic() - self.began:6.1f} s  {text}"
        self.log.append(line)
        print(line, flush=True)

    def end(self) -> None:
        """Nothing of it stays."""
        if self.job is not None:
            health.kill([self.job.pid, *health.descendants([self.job.pid])])


def _title(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def _forked_rank(pid: int) -> bool:
    """A child of the fork server; the server and its tracker are children of the driver."""
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        return "forkserver" in _title(pid) and parent is not None and "forkserver" in _title(parent.pid)
    except psutil.Error:
        return False


# ------------------------------------------------------------------------------------------------------------ ledger


def ledger(samples: Path, steps: int) -> dict[int, Counter[str]]:
    """By epoch: how often each prompt was trained on, from the samples that the run wrote."""
    used: dict[int, Counter[str]] = {}
    for step in range(1, steps + 1):
        rows = [json.loads(line) for line in (samples / f"step_{step}.jsonl").read_text().splitlines()]
        epoch = (step - 1) * BATCH // PROMPTS
        used.setdefault(epoch, Counter()).update(str(row["prompt"]) for row in rows)
    return used


def assert_every_prompt_once(samples: Path, steps: int) -> dict[int, Counter[str]]:
    """Every whole epoch used the same prompts, each ``SAMPLES`` times per row of the data set."""
    used = ledger(samples, steps)
    whole = [used[epoch] for epoch in range(steps * BATCH // PROMPTS)]
    assert all(sum(epoch.values()) == PROMPTS * SAMPLES for epoch in whole)
    assert all(epoch == whole[0] for epoch in whole), "a prompt was lost or used twice"
    return used


def undisturbed(folder: Path, steps: int, rollout: str = "hf") -> None:
    """The same job, alone; with the threads of this process, which must be one."""
    options = job_options(folder / "no_orders", steps, rollout)
    run_job(folder / "whole", **options | {"trainer.rollout_data_dir": str(folder / "whole" / "samples")})


def compare(folder: Path, steps: int) -> Mapping[str, int]:
    """Raises unless both runs ended the same; what was compared, counted."""
    own = ("perf/", "publish/")  # bytes and messages travel otherwise on Ray
    one, two = (
        [{name: value for name, value in row.items() if not name.startswith(own)} for row in lines(folder / name)]
        for name in ("whole", "chaos")
    )
    assert [row["step"] for row in two] == [row["step"] for row in one], "a line is lost or there twice"
    for before, after in zip(one, two, strict=True):
        assert before == after, f"step {before['step']}"
    last = Path(f"global_step_{steps}") / "actor"
    whole, again = tensors(folder / "whole" / last), tensors(folder / "chaos" / last)
    assert whole.keys() == again.keys()
    assert [name for name in whole if not whole[name].equal(again[name])] == []
    used = assert_every_prompt_once(folder / "chaos" / "samples", steps)
    assert used == ledger(folder / "whole" / "samples", steps)
    return {"lines": len(one), "tensors": len(whole), "prompts": sum(len(epoch) for epoch in used.values())}


def disturbed(folder: Path, *, seed: int, steps: int, counts: Mapping[str, int], rollout: str = "hf") -> None:
    """The job through all faults in a seeded order, on this machine or, where faults need them, over two Ray nodes."""
    faults = [fault for fault, count in counts.items() for _ in range(count)]
    over_nodes = any(fault in RAY for fault in faults)
    assert all((fault in RAY) == over_nodes for fault in faults), "one run is on this machine or over nodes"
    random.Random(seed).shuffle(faults)
    with ExitStack() as stack:
        nodes = stack.enter_context(two_nodes(folder)) if over_nodes else None
        chaos = Chaos(folder, seed, steps, nodes, rollout)
        stack.callback(chaos.end)
        chaos.suffer(faults)
        chaos.finish()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rollout", default="hf")
    for fault in FAULTS:
        parser.add_argument(f"--{fault.replace(' ', '-')}", type=int, default=0)
    asked = parser.parse_args()
    counts = {fault: getattr(asked, fault.replace(" ", "_")) for fault in FAULTS}
    print(f"seed {asked.seed}, {asked.steps} steps, rollout {asked.rollout}, {asked.folder}", flush=True)
    print(", ".join(f"{count} x {fault}" for fault, count in counts.items() if count), flush=True)
    shutil.rmtree(asked.folder, ignore_errors=True)
    disturbed(asked.folder, seed=asked.seed, steps=asked.steps, counts=counts, rollout=asked.rollout)
    undisturbed(asked.folder, asked.steps, asked.rollout)
    equal = compare(asked.folder, asked.steps)
    print(", ".join(f"{count} {what}" for what, count in equal.items()), "are those of the undisturbed run", flush=True)


if __name__ == "__main__":
    main()
