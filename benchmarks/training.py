"""Speed and memory of the training engine in one process, each figure beside its goal.

    python benchmarks/training.py overhead MODEL [--tokens 4096] [--dtype fp32] [--repeat 2]
    python benchmarks/training.py padded   MODEL [--rows 8] [--longest 512] [--dtype fp32]
    python benchmarks/training.py ceiling  MODEL [--tokens 2048] [--segment 128] [--dtype fp32]
    python benchmarks/training.py logits   [--tokens 1024] [--vocabulary 151936] [--hidden 896] [--dtype fp32]
    python benchmarks/training.py sharing  MODEL [--group 8] [--response 64] [--prompt 256]
    python benchmarks/training.py balance  [--rows 4096] [--ranks 64]

*overhead*: one update (forward, log-prob, backward, clip, AdamW) against a hand-written loop over the same rows as one
batch. *padded*: rows of skewed lengths against the loop that TRL runs, padded to the longest. *ceiling*: forward,
log-prob and backward as a share of what a matrix product of this machine reaches, beside plain PyTorch. *logits*: peak
memory of log-prob and entropy, forward and backward, against log_softmax. *sharing*: rows of one prompt packed whole
and behind one copy of it, forward and update. *balance*: row costs over ranks.
The script runs unchanged on GPUs (``--device cuda``) and prints MFU there.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from hybridflow.algorithms.contract import Counts, Metric, Outputs
from hybridflow.batch.balance import balance, row_cost
from hybridflow.batch.batch import Batch
from hybridflow.config.model import FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.engines.train.work import peak_flops
from hybridflow.models.load import dtype_of, load_causal_lm
from hybridflow.models.logprobs import token_log_probs
from hybridflow.models.packing import pack
from hybridflow.topology.parallel import ParallelDims
from hybridflow.workers.profiler import allocations

CLOCK = time.process_time if os.environ.get("MEASURE") == "cpu" else time.perf_counter
"""CPU time (MEASURE=cpu) compares two sides on a machine with other work; it is a measure with one thread only."""
KEPT_BYTES = 512 << 20
"""Logits up to this are small: kept, and then no slower than the naive way."""
CEILINGS = {"fp32": 0.80, "bf16": 0.35}
"""Goals of *ceiling*."""


class NegativeLogProb:
    """Minus the mean log-prob: the cheapest loss there is."""

    needs = frozenset({"log_probs"})

    def __call__(self, outputs: Outputs, rows: Batch, counts: Counts) -> tuple[Tensor, dict[str, Metric]]:
        assert outputs.log_probs is not None
        return -torch.where(rows["loss_mask"], outputs.log_probs, 0.0).sum() / counts.tokens, {}


def make_rows(lengths: list[int], vocabulary: int, prompt: int = 1) -> Batch:
    """Rows of one prompt and one response of each length."""
    width, count = max(lengths), len(lengths)
    ids = torch.randint(10, vocabulary, (count, width + prompt), generator=torch.Generator().manual_seed(0))
    length = torch.tensor(lengths)
    return Batch(
        {
            "prompt_ids": ids[:1, :prompt].repeat(count, 1),
            "prompt_length": torch.full((count,), prompt),
            "response_ids": ids[:, prompt:],
            "response_length": length,
            "loss_mask": torch.arange(width) < length[:, None],
        }
    )


def skewed_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of which half are below a fifth of the longest, as responses are."""
    draw = random.Random(seed)
    found = [max(4, min(longest, round(draw.lognormvariate(0.0, 1.0) * longest / 5))) for _ in range(count - 1)]
    return [longest, *found]


def seconds(step: Callable[[], object], repeat: int, device: str) -> float:
    """The fastest of ``repeat`` runs after one warm-up."""
    return side_by_side([step], repeat, device)[0]


def side_by_side(steps: Sequence[Callable[[], object]], repeat: int, device: str) -> list[float]:
    """The fastest of ``repeat`` runs of each step, one of each in turn, after one warm-up of each."""
    best = [math.inf] * len(steps)
    for turn in range(repeat + 1):
        for number, step in enumerate(steps):
            start = CLOCK()
            step()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if turn:
                best[number] = min(best[number], CLOCK() - start)
    return best


def say(what: str, figure: str, goal: str, met: bool) -> None:
    """One line of the report."""
    print(f"| {what} | {figure} | {goal} | {'met' if met else 'MISSED'} |", flush=True)


def build(given: argparse.Namespace, **options: bool) -> FSDPEngine:
    return FSDPEngine(
        model=ModelConfig(path=given.model),
        head="lm",
        sharding=FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype=given.dtype)),
        dims=ParallelDims(),
        optim=OptimConfig(lr=1e-6),
        device=given.device,
        **options,
    )


class Sides:
    """The engine and a hand-written loop on one model."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._device = given.device
        self.engine = build(given)
        shapes = self.engine.parameter_shapes()
        self.parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
        self.vocabulary = next(shape[0] for name, shape in shapes.items() if "embed" in name)
        self.plain: Any = load_causal_lm(given.model, dtype=dtype_of(given.dtype), device=given.device)
        self._optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-6, fused=True)

    def ours(self, rows: Batch, max_tokens: int) -> Callable[[], object]:
        """One update of the engine."""
        counts, micro = self.engine.counts(rows), MicroBatching(max_tokens=max_tokens)
        return lambda: self.engine.update(rows, NegativeLogProb(), temperature=1.0, micro=micro, counts=counts)

    def gradient(self, rows: Batch) -> Callable[[], object]:
        """Forward, log-prob and backward of the engine's own model, without clipping and optimizer."""
        packed = pack(rows.to(self._device))
        model = self.engine._model
        model.train()

        def step() -> None:
            model(packed, frozenset({"log_probs"}), 1.0)["log_probs"].mean().neg().backward()
            model.zero_grad(set_to_none=True)

        return step

    def gradient_by_hand(self, rows: Batch) -> Callable[[], object]:
        """The same in plain PyTorch, rows as one batch."""
        ids = torch.cat([rows["prompt_ids"], rows["response_ids"]], 1).to(self._device)

        def step() -> None:
            logits = self.plain(ids, use_cache=False).logits[:, :-1].float()
            (logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)).mean().neg().backward()
            self.plain.zero_grad(set_to_none=True)

        return step

    def by_hand(self, rows: Batch, *, padded: bool) -> Callable[[], object]:
        """The same update in plain PyTorch: rows as one batch, padded on the right to the longest."""
        ids = torch.cat([rows["prompt_ids"], rows["response_ids"]], 1).to(self._device)
        mask = rows["loss_mask"].to(self._device)
        seen = torch.cat([torch.ones_like(mask[:, :1]), mask], 1).long() if padded else None

        def step() -> None:
            # As TRL does: the log-prob of one token at a time from logits over the whole padded batch.
            logits = self.plain(ids, attention_mask=seen, use_cache=False).logits[:, :-1].float()
            log_probs = logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
            (-(log_probs * mask).sum() / mask.sum()).backward()
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

        return step


def overhead(given: argparse.Namespace) -> None:
    """The engine against the hand-written loop on equal segments."""
    sides = Sides(given)
    rows = make_rows([given.segment - 1] * (given.tokens // given.segment), sides.vocabulary)
    steps = sides.ours(rows, given.tokens), sides.by_hand(rows, padded=False)
    ours, theirs = side_by_side(steps, given.repeat, given.device)
    figure = f"{ours:.2f} s / {theirs:.2f} s = {ours / theirs:.3f}"
    say(f"update against a plain loop, {given.dtype}, {given.tokens} tokens", figure, "<= 1.05", ours <= 1.05 * theirs)


def padded(given: argparse.Namespace) -> None:
    """The engine against the padded loop on skewed lengths."""
    sides = Sides(given)
    lengths = skewed_lengths(given.rows, given.longest)
    rows = make_rows(lengths, sides.vocabulary)
    tokens = sum(lengths) + len(lengths)
    steps = sides.ours(rows, given.longest * 4), sides.by_hand(rows, padded=True)
    ours, theirs = side_by_side(steps, given.repeat, given.device)
    ratio, gained = len(lengths) * (given.longest + 1) / tokens, theirs / ours
    figure = f"{theirs:.2f} s / {ours:.2f} s = {gained:.2f} of {ratio:.2f} = {gained / ratio:.2f}"
    say(f"padded loop, {given.dtype}, {tokens} of {len(lengths) * (given.longest + 1)} tokens", figure, ">= 0.85",
        gained >= 0.85 * ratio)  # fmt: skip


def ceiling(given: argparse.Namespace) -> None:
    """The engine and plain PyTorch as shares of a matrix product's speed."""
    dtype = dtype_of(given.dtype)
    left, right = (torch.randn(2048, 2048, dtype=dtype, device=given.device) for _ in range(2))
    sides = Sides(given)
    rows = make_rows([given.segment - 1] * (given.tokens // given.segment), sides.vocabulary)
    goal = CEILINGS[given.dtype]
    steps = lambda: left @ right, sides.gradient(rows), sides.gradient_by_hand(rows)
    product, *updates = side_by_side(steps, given.repeat, given.device)
    best = 2 * 2048**3 / product
    for name, taken in zip(("hybridflow", "plain PyTorch"), updates, strict=True):
        flops = 6 * sides.parameters * given.tokens / taken
        figure = f"{taken:.2f} s, {flops / 1e9:.0f} of {best / 1e9:.0f} GFLOP/s = {flops / best:.2f}"
        what = f"{name}, {given.dtype}, {given.tokens} tokens in segments of {given.segment}"
        say(what, figure, f">= {goal:.2f}", flops >= goal * best)
        if given.device.startswith("cuda"):
            print(f"  MFU {flops / peak_flops(given.device, dtype):.3f}")


def logits(given: argparse.Namespace) -> None:
    """Memory of log-prob and entropy with their gradients."""
    dtype = dtype_of(given.dtype)
    hidden = torch.randn(given.tokens, given.hidden, dtype=dtype, device=given.device)
    weight = torch.randn(given.vocabulary, given.hidden, dtype=dtype, device=given.device) / given.hidden**0.5
    targets = torch.randint(given.vocabulary, (given.tokens,), device=given.device)

    def naive(h: Tensor, w: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        log_p = torch.log_softmax((h @ w.t()).float(), -1)
        picked = log_p.gather(1, targets[:, None])[:, 0]
        return picked, -(log_p.exp() * log_p).sum(-1) if entropy else None

    def ours(h: Tensor, w: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        return token_log_probs(h, w, targets, entropy=entropy)

    mine, other = (_peak(function, hidden, weight, given.device) for function in (ours, naive))
    size = f"{given.dtype}, T={given.tokens}, V={given.vocabulary}"
    figure = f"{mine / 2**20:,.0f} / {other / 2**20:,.0f} MiB = {mine / other:.2f}"
    small = 4 * given.tokens * given.vocabulary < KEPT_BYTES
    say(f"log-prob and entropy, memory, {size}", figure, "-" if small else "<= 0.45", small or mine <= 0.45 * other)
    goal = "<= 1 (small)" if small else "-"
    for what, entropy in (("log-prob and entropy", True), ("log-prob", False)):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        steps = [partial(_both, function, *inputs, entropy=entropy) for function in (ours, naive)]
        mine_s, other_s = side_by_side(steps, given.repeat, given.device)
        figure = f"{mine_s * 1e3:.3f} / {other_s * 1e3:.3f} ms = {mine_s / other_s:.2f}"
        say(f"{what}, time, {size}", figure, goal, not small or mine_s <= other_s)


def _both(function: Callable[..., Any], hidden: Tensor, weight: Tensor, *, entropy: bool = True) -> None:
    log_probs, entropies = function(hidden, weight, entropy)
    loss = log_probs.sum()
    (loss + 0.01 * entropies.sum() if entropy else loss).backward()


def _peak(function: Callable[..., Any], hidden: Tensor, weight: Tensor, device: str) -> int:
    """Highest allocation above the inputs in forward and backward, gradients included."""
    h, w = (tensor.clone().requires_grad_() for tensor in (hidden, weight))
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _both(function, h, w)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        _both(function, h, w)
    return allocations(session.profiler.kineto_results.experimental_event_tree())[0]


def compare_sharing(given: argparse.Namespace) -> None:
    """One group of rows, its prompt encoded once against once per row; both in turn, the fastest of each counts."""
    needs, micro = frozenset({"log_probs"}), MicroBatching(max_tokens=1 << 30)
    engines = [build(given, share_prompts=shares) for shares in (False, True)]
    vocabulary = next(shape[0] for name, shape in engines[0].parameter_shapes().items() if "embed" in name)
    rows = make_rows([given.response] * given.group, vocabulary, given.prompt)
    counts = engines[0].counts(rows)
    flops, log_probs = [], []
    for engine in engines:
        with FlopCounterMode(display=False) as counter:
            log_probs.append(engine.forward(rows, needs, temperature=1.0, micro=micro)["log_probs"])
        flops.append(counter.get_total_flops())
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(given.repeat + 1):
        for number, engine in enumerate(engines):
            for what in ("forward", "update"):
                wall, cpu = time.perf_counter(), time.process_time()
                if what == "forward":
                    engine.forward(rows, needs, temperature=1.0, micro=micro)
                else:
                    engine.update(rows, NegativeLogProb(), temperature=1.0, micro=micro, counts=counts)
                if given.device.startswith("cuda"):
                    torch.cuda.synchronize()
                spent = time.perf_counter() - wall, time.process_time() - cpu
                taken.setdefault((what, number), []).append(spent)
    print(f"{given.group} rows, prompt {given.prompt}, response {given.response}, {given.dtype}: prompt per row / once")
    print(f"forward  {flops[0] / 1e9:9.1f} / {flops[1] / 1e9:8.1f} GFLOP    {flops[0] / flops[1]:.2f} x")
    for what in ("forward", "update"):
        for kind, name in enumerate(("wall", "CPU")):
            whole, once = (min(runs[kind] for runs in taken[what, number][1:]) for number in (0, 1))
            print(f"{what:8s} {whole:9.3f} / {once:8.3f} s {name:8s} {whole / once:.2f} x")
    print(f"largest difference of log-probs {float((log_probs[0] - log_probs[1]).abs().max()):.1e}")


def balance_rows(given: argparse.Namespace) -> None:
    """Skewed row costs over ranks."""
    costs = [row_cost(length) for length in skewed_lengths(given.rows, 4096)]
    for equal in (False, True):
        taken = seconds(lambda equal=equal: balance(costs, given.ranks, equal_counts=equal), 5, "cpu")
        sums = [sum(costs[i] for i in part) for part in balance(costs, given.ranks, equal_counts=equal)]
        over = max(sums) * given.ranks / sum(sums) - 1
        figure = f"{1e3 * taken:.1f} ms, heaviest {100 * over:.2f} % above the mean"
        what = f"{given.rows} rows over {given.ranks} ranks{', equal counts' if equal else ''}"
        say(what, figure, "< 20 ms, <= 1 %", taken < 0.02 and over <= 0.01)


PARTS = {
    "overhead": overhead,
    "padded": padded,
    "ceiling": ceiling,
    "logits": logits,
    "sharing": compare_sharing,
    "balance": balance_rows,
}
DEFAULT_TOKENS = {"overhead": 4096, "ceiling": 2048, "logits": 1024}
DEFAULT_ROWS = {"padded": 8, "balance": 4096}


def main() -> None:
    """Measures one part and prints its lines of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("model", nargs="?", help="folder of the model, where the part needs one")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--segment", type=int, default=128)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--group", type=int, default=8, help="rows of one prompt (sharing)")
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--dtype", default="fp32", choices=CEILINGS)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    given.tokens = given.tokens or DEFAULT_TOKENS.get(given.part)
    given.rows = given.rows or DEFAULT_ROWS.get(given.part)
    if given.part in ("overhead", "padded", "ceiling", "sharing"):
        if given.model is None:
            parser.error(f"{given.part} needs the folder of a model")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    PARTS[given.part](given)


if __name__ == "__main__":
    main()
