"""Generation speed: our step loop over vLLM in each way to hold CPU weights, transformers, and stock vLLM alone.

    python benchmarks/rollout.py --model FOLDER --rows 64 --tokens 64 --dtype fp32 --repeats 3

Every variant runs in a process of its own (they hold weights differently), variants take turns within a repeat, and
each process generates once to warm up and once measured. All run the same prompts, seeds and token counts (end tokens
are ignored). Printed per variant: tokens per second of wall time and of process CPU time, one number per repeat; then
the CPU seconds of what a training step asks of the generator: new weights written in float32, made usable (packed
GEMM: packed again), and the rows generated. The weights are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridflow.engines.rollout.environment import unset, variables

VARIANTS = ("stock", "padded", "plain", "packed", "hf")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face model folder")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of every row")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables("vllm", arguments.device)}
    for name in unset("vllm", arguments.device):
        environment.pop(name, None)
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in arguments.variants}
    for _ in range(arguments.repeats):
        for variant in arguments.variants:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", variant]
            answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            found[variant].append(json.loads(answer.stdout.strip().splitlines()[-1]))
    for variant, runs in found.items():
        for unit in ("wall", "cpu"):
            print(f"{variant:8s} tokens per {unit} second: " + " ".join(f"{run[unit]:9.0f}" for run in runs))
    for variant, runs in found.items():
        parts = [
            f"{sorted(run[part] for run in runs)[len(runs) // 2]:8.3f}"
            for part in ("write", "ready", "generate", "step")
            if part in runs[0]
        ]
        if parts:
            print(f"{variant:8s} CPU s, median: write, make ready, generate, together: " + " ".join(parts))


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of wall time and of CPU time of one variant, in this process."""
    rows, tokens = arguments.rows, arguments.tokens
    prompts = [[4 + (i * 31 + j * 7) % 40 for j in range(arguments.prompt_tokens)] for i in range(rows)]
    run, publish = (stock(arguments, prompts), None) if arguments.one == "stock" else ours(arguments, prompts)
    if publish is not None:
        publish(0)
    run(0)
    phases = publish(1) if publish is not None else {}
    wall, cpu = time.perf_counter(), time.process_time()
    count = run(1)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert count == rows * tokens, f"{count} tokens in place of {rows * tokens}"
    if phases:
        phases |= {"generate": cpu, "step": sum(phases.values()) + cpu}
    return {"wall": count / wall, "cpu": count / cpu, **phases}


def ours(arguments: argparse.Namespace, prompts: list[list[int]]):
    import torch

    from hybridflow.config.actor import RolloutConfig
    from hybridflow.engines.rollout.base import Request, SamplingParams, generate
    from hybridflow.engines.rollout.registry import ROLLOUT_ENGINES
    from hybridflow.utils.optional import load
    from hybridflow.utils.seeding import derive_seed

    name, options = ("hf", {}) if arguments.one == "hf" else ("vllm", {"vllm": {"cpu_gemm": arguments.one}})
    config = RolloutConfig(name=name, dtype=arguments.dtype, max_num_seqs=arguments.rows, engine_kwargs=options)
    engine = load(ROLLOUT_ENGINES[name])(
        model_path=arguments.model,
        config=config,
        max_prompt_tokens=arguments.prompt_tokens,
        max_response_tokens=arguments.tokens,
        tp=1,
        device=arguments.device,
    )
    parts = engine.parameters().parts
    generator = torch.Generator().manual_seed(1)
    sources = [0.02 * torch.randn(part.view.shape, generator=generator) for part in parts]
    sampling = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)

    def run(turn: int) -> int:
        engine.clear_caches()
        requests = [
            Request(request_id=str(i), prompt_ids=prompt, sampling=sampling, seed=derive_seed(turn, i))
            for i, prompt in enumerate(prompts)
        ]
        return sum(len(done.token_ids) for done in generate(engine, requests))

    def publish(version: int) -> dict[str, float]:
        started = time.process_time()
        for part, source in zip(parts, sources, strict=True):
            part.view.copy_(source)
        written = time.process_time()
        engine.weights_written(version)
        return {"write": written - started, "ready": time.process_time() - written}

    return run, publish


def stock(arguments: argparse.Namespace, prompts: list[list[int]]):
    """``vllm.LLM.generate`` as its users run it, with log-probs and a seed per request."""
    from vllm import LLM, SamplingParams

    from hybridflow.engines.rollout.inflight import DTYPES
    from hybridflow.utils.seeding import derive_seed

    engine = LLM(
        arguments.model,
        dtype=DTYPES[arguments.dtype],
        load_format="dummy",
        max_model_len=arguments.prompt_tokens + arguments.tokens,
        max_num_seqs=arguments.rows,
        max_num_batched_tokens=8192,
        enforce_eager=arguments.device == "cpu",
        kv_cache_memory_bytes=1 << 30 if arguments.device == "cpu" else None,
        logprobs_mode="processed_logprobs",
    )

    def run(turn: int) -> int:
        engine.reset_prefix_cache()
        sampling = [
            SamplingParams(
                max_tokens=arguments.tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=derive_seed(turn, i)
            )
            for i in range(arguments.rows)
        ]
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


if __name__ == "__main__":
    main()
