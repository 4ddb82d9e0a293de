"""TRL's half of the comparison; runs in TRL's own environment: ``python trl_side.py SPEC.json RESULT.json``.

The spec is written by ``vs_trl.py``. The result holds the seconds of every step and of the generation inside it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from reward import compute_score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Seconds of each optimizer step and of ``generate`` within it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.generation: list[float] = []
        self.generating = 0.0
        self._last = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if not self.steps:  # later steps begin where the one before ended: data loading counts
            self._last = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        self.steps.append(now - self._last)
        self.generation.append(self.generating)
        self._last, self.generating = now, 0.0


def timed_generate(model, clock: StepClock) -> None:
    generate = model.generate

    def timed(*args, **kwargs):
        start = time.perf_counter()
        try:
            return generate(*args, **kwargs)
        finally:
            clock.generating += time.perf_counter() - start

    model.generate = timed


def main(spec_path: str, result_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    torch.set_num_threads(spec["threads"])
    tokens, completions = spec["response_tokens"], spec["prompts"] * spec["samples"]
    lengths: list[int] = []

    def reward(completions, completion_ids, **_):
        lengths.extend(len(ids) for ids in completion_ids)
        return [compute_score("", text, "") for text in completions]

    settings = GRPOConfig(
        output_dir=spec["folder"],
        use_cpu=not torch.cuda.is_available(),
        bf16=spec["dtype"] == "bf16",
        per_device_train_batch_size=spec["micro_batch"],
        gradient_accumulation_steps=completions // spec["micro_batch"],
        generation_batch_size=completions,
        num_generations=spec["samples"],
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
        max_steps=spec["steps"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    rows = [json.loads(line) for line in Path(spec["train_file"]).read_text().splitlines()]
    clock = StepClock()
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    timed_generate(model, clock)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    result = {
        "versions": {"trl": trl.__version__, "torch": torch.__version__},
        "step_s": clock.steps,
        "generate_s": clock.generation,
        "tokens_per_step": sum(lengths) / len(clock.steps),
    }
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
