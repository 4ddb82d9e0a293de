"""Stock vLLM alone on the comparison's prompts: ``python vllm_side.py SPEC.json RESULT.json``; generation only.

Every request has a seed of its own and its sampled log-probs are asked for, as training needs them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
import vllm

KV_CACHE_BYTES = 512 << 20


def main(spec_path: str, result_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    engine = vllm.LLM(
        spec["model"],
        dtype={"fp32": "float32", "bf16": "bfloat16"}[spec["dtype"]],
        enforce_eager=not torch.cuda.is_available(),
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        max_model_len=spec["prompt_tokens"] + spec["response_tokens"],
        logprobs_mode="processed_logprobs",
        seed=1,
    )
    rows = [json.loads(line)["prompt"] for line in Path(spec["train_file"]).read_text().splitlines()]
    seconds, produced = [], 0
    for step in range(spec["steps"]):
        first = step * spec["prompts"] % len(rows)
        prompts = [p for p in (rows + rows)[first : first + spec["prompts"]] for _ in range(spec["samples"])]
        sampling = [
            vllm.SamplingParams(
                temperature=1.0, max_tokens=spec["response_tokens"], ignore_eos=True, logprobs=0, seed=step * 10_000 + i
            )
            for i in range(len(prompts))
        ]
        start = time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        produced += sum(len(output.outputs[0].token_ids) for output in done)
        engine.reset_prefix_cache()
    result = {
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "step_s": None,
        "generate_s": seconds,
        "tokens_per_step": produced / len(seconds),
    }
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
