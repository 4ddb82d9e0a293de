"""hybridflow against TRL's GRPOTrainer (and stock vLLM's generation) on the same work, pair by pair.

Same model, prompts, group size, token counts (no response ends early), updates and dtype; one optimizer step a trainer
step, no KL. bf16 means float32 master weights with bf16 compute on both sides. Each contestant runs in a process of its
own with all cores; the order within a pair alternates; the first steps of a run are dropped; the figure is the median
of the rest. Peak memory is the largest sum of proportional set sizes over the contestant's process tree.

    python benchmarks/vs_trl.py --work tiny
    python benchmarks/vs_trl.py --work smollm2 --model PATH --dtype bf16 --pairs 2
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
CONTESTANTS = ("hybridflow", "trl", "vllm")
ROW = "| {:<12} | {:>12} | {:>14} | {:>10} | {:>14} | {:>12} |"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The work, as every contestant gets it."""

    model: str
    train_file: str
    val_file: str
    folder: str
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    micro_batch: int
    """Sequences per forward and backward."""
    steps: int
    dtype: str
    lr: float
    threads: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run of a contestant measured."""

    contestant: str
    step_s: float | None
    generate_s: float
    tokens_per_step: float
    peak_memory_mib: float
    total_s: float
    versions: dict[str, str]


WORKS = {
    "tiny": dict(prompts=8, samples=8, prompt_tokens=16, response_tokens=32, micro_batch=64),
    "smollm2": dict(prompts=8, samples=8, prompt_tokens=16, response_tokens=64, micro_batch=8),
}


def main() -> int:
    options = parse()
    python_trl = trl_environment(Path(options.trl_venv)) if "trl" in options.contestants else None
    with tempfile.TemporaryDirectory(prefix="vs_trl_") as folder:
        spec = prepare(options, Path(folder))
        results: list[Result] = []
        for pair in range(options.pairs):
            order = options.contestants if pair % 2 == 0 else options.contestants[::-1]
            for name in order:
                print(f"pair {pair + 1}/{options.pairs}: {name}", file=sys.stderr, flush=True)
                results.append(measure(name, spec, python_trl, options))
    text = report(results, spec, options)
    print(text)
    stamp = datetime.now(UTC).strftime("%Y-%m-%d")
    out = Path(options.out or HERE / "results" / f"{stamp}_vs_trl_{options.work}_{options.dtype}.md")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n")
    print(f"written to {out}", file=sys.stderr)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", choices=WORKS, default="tiny")
    parser.add_argument("--model", help="model folder; the tiny work makes its own")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="trainer steps of a run")
    parser.add_argument("--drop", type=int, default=2, help="first steps of a run that are not counted")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--trl-venv", default=str(HERE / ".trl_venv"))
    parser.add_argument("--override", action="append", default=[], help="a further override of hybridflow's job")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", help="result file")
    options = parser.parse_args()
    if options.work != "tiny" and not options.model:
        parser.error(f"--work {options.work} needs --model FOLDER")
    if options.drop >= options.steps:
        parser.error("--drop must be smaller than --steps")
    return options


def trl_environment(folder: Path) -> Path:
    """The Python of TRL's environment, which is made when it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with TRL (some minutes)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pins = [f"torch=={version('torch').split('+')[0]}", "trl", "psutil"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)
    return python


def prepare(options: argparse.Namespace, folder: Path) -> Spec:
    """Writes prompts (and the tiny model) and says what the work is."""
    generator = random.Random(1)
    for name, rows in {"train": 256, "val": 8}.items():
        with open(folder / f"{name}.jsonl", "w") as file:
            for _ in range(rows):
                a, b = generator.randint(10, 99), generator.randint(10, 99)
                row = {"prompt": f"{a}+{b}=", "data_source": "digits", "reward_model": {"ground_truth": str(a + b)}}
                file.write(json.dumps(row) + "\n")
    model = options.model
    if not model:
        sys.path.insert(0, str(REPO))
        from tests.tiny import save_tiny_model

        sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, head_dim=32)
        model = save_tiny_model(folder / "model", **sizes)
    return Spec(
        model=str(Path(model).resolve()),
        train_file=str(folder / "train.jsonl"),
        val_file=str(folder / "val.jsonl"),
        folder=str(folder),
        steps=options.steps,
        dtype=options.dtype,
        lr=1e-6,
        threads=options.threads,
        **WORKS[options.work],
    )


def measure(name: str, spec: Spec, python_trl: Path | None, options: argparse.Namespace) -> Result:
    """One run of one contestant in a process of its own."""
    folder = Path(tempfile.mkdtemp(dir=spec.folder, prefix=f"{name}_"))
    spec_file, result_file = folder / "spec.json", folder / "result.json"
    spec_file.write_text(json.dumps({**asdict(spec), "folder": str(folder)}))
    if name == "hybridflow":
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "hybridflow.main_ppo",
            *overrides(spec, folder),
            *options.override,
        ]
    else:
        python = python_trl if name == "trl" else sys.executable
        command = [str(python), HERE / f"{name}_side.py", spec_file, result_file]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": f"{REPO}:{HERE}" if name == "hybridflow" else str(HERE),
    }
    if name != "hybridflow":  # hybridflow caps its own workers
        environment["OMP_NUM_THREADS"] = str(spec.threads)
    start = time.perf_counter()
    peak = run_watched(command, environment, folder / "log.txt")
    total = time.perf_counter() - start
    found = (
        read_metrics(folder, spec.prompts * spec.samples)
        if name == "hybridflow"
        else json.loads(result_file.read_text())
    )
    steps = found["step_s"]
    return Result(
        contestant=name,
        step_s=None if steps is None else statistics.median(steps[options.drop :]),
        generate_s=statistics.median(found["generate_s"][options.drop :]),
        tokens_per_step=found["tokens_per_step"],
        peak_memory_mib=peak / 2**20,
        total_s=total,
        versions=found["versions"],
    )


def overrides(spec: Spec, folder: Path) -> list[str]:
    """The work as overrides of hybridflow's main job."""
    low = spec.dtype
    return [
        f"data.train_files=[{spec.train_file}]",
        f"data.val_files=[{spec.val_file}]",
        f"data.train_batch_size={spec.prompts}",
        f"data.max_prompt_length={spec.prompt_tokens}",
        f"data.max_response_length={spec.response_tokens}",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        f"actor_rollout_ref.model.path={spec.model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={spec.prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=False",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={spec.micro_batch}",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={spec.micro_batch}",
        f"actor_rollout_ref.actor.optim.lr={spec.lr}",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={low}",
        f"actor_rollout_ref.rollout.n={spec.samples}",
        f"actor_rollout_ref.rollout.dtype={low}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.rollout.temperature=1.0",
        f"trainer.total_training_steps={spec.steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "trainer.logger=[jsonl]",
        f"trainer.threads_per_worker={spec.threads}",
        f"trainer.default_local_dir={folder}",
    ]


def read_metrics(folder: Path, completions: int) -> dict:
    """hybridflow's own figures of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "timing_s/gen" in row]
    return {
        "versions": {"hybridflow": version_of_code(), "torch": version("torch")},
        "step_s": [row["timing_s/step"] for row in steps],
        "generate_s": [row["timing_s/gen"] for row in steps],
        "tokens_per_step": statistics.mean(row["response_length/mean"] for row in steps) * completions,
    }


def run_watched(command: Sequence[str | Path], environment: dict[str, str], log: Path) -> float:
    """Peak bytes of the process tree; a failing command ends the comparison with the end of its log."""
    with open(log, "w") as output:
        process = subprocess.Popen(
            [str(part) for part in command], env=environment, cwd=REPO, stdout=output, stderr=subprocess.STDOUT
        )
        peak = [0.0]
        watcher = threading.Thread(target=watch, args=(process, peak), daemon=True)
        watcher.start()
        code = process.wait()
        watcher.join(timeout=10)
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SystemExit(f"{command[0]} ... ended with {code}:\n{tail}")
    return peak[0]


def watch(process: subprocess.Popen, peak: list[float]) -> None:
    """Samples the sum of proportional set sizes once a second, in a way that costs the contestant little."""
    while process.poll() is None:
        total = 0
        try:
            root = psutil.Process(process.pid)
            for member in (root, *root.children(recursive=True)):
                try:
                    total += proportional_bytes(member.pid)
                except OSError:
                    continue  # it ended between the listing and the look
        except psutil.NoSuchProcess:
            return
        peak[0] = max(peak[0], total)
        time.sleep(1.0)


def proportional_bytes(pid: int) -> int:
    """Proportional set size: shared pages are divided by the number of processes that map them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def report(results: Sequence[Result], spec: Spec, options: argparse.Namespace) -> str:
    """The table: one line a run, then the ratios of the medians."""
    completions = spec.prompts * spec.samples
    lines = [
        f"# {options.work}, {options.dtype}: {completions} completions x {spec.response_tokens} tokens",
        "",
        f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; commit {version_of_code()}",
        f"- machine: {cpu_name()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        f"- Python {platform.python_version()}; load at the end {os.getloadavg()[0]:.1f}",
        f"- command: `python {' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`",
        f"- versions: {json.dumps({key: value for result in results for key, value in result.versions.items()})}",
        f"- {options.steps} steps a run, the first {options.drop} dropped, medians",
        "",
        ROW.format("contestant", "step s", "generation s", "tok/s gen", "peak MiB", "whole run s"),
        ROW.format(*["---"] * 6),
    ]
    for result in results:
        lines.append(
            ROW.format(
                result.contestant,
                "-" if result.step_s is None else f"{result.step_s:.3f}",
                f"{result.generate_s:.3f}",
                f"{completions * spec.response_tokens / result.generate_s:,.0f}",
                f"{result.peak_memory_mib:,.0f}",
                f"{result.total_s:.1f}",
            )
        )
    expected = completions * spec.response_tokens
    wrong = [f"{r.contestant}: {r.tokens_per_step:.0f}" for r in results if r.tokens_per_step != expected]
    if wrong:
        lines += ["", f"**Not comparable**: {expected} tokens a step were asked for; found {', '.join(wrong)}"]
    return "\n".join([*lines, "", *ratios(results)])


def ratios(results: Sequence[Result]) -> list[str]:
    """Median of hybridflow over median of each other contestant, quantity by quantity; below 1 is better for us."""
    lines = []
    for other in ("trl", "vllm"):
        for quantity in ("step_s", "generate_s", "peak_memory_mib"):
            mine = [getattr(r, quantity) for r in results if r.contestant == "hybridflow"]
            theirs = [getattr(r, quantity) for r in results if r.contestant == other]
            if not mine or not theirs or None in (*mine, *theirs) or (other == "vllm" and quantity != "generate_s"):
                continue
            ratio = statistics.median(mine) / statistics.median(theirs)
            pairs = ", ".join(f"{a / b:.2f}" for a, b in zip(mine, theirs, strict=False))
            lines.append(f"- hybridflow / {other}, {quantity}: **{ratio:.2f}** (pair by pair: {pairs})")
    return lines


def version_of_code() -> str:
    """Short commit, with a plus when the tree has changes."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=REPO, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if dirty else "")


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    raise SystemExit(main())
