"""Ours against gathering everything, on the same processes: bytes, seconds and memory of one weight transfer.

    python benchmarks/reshard.py                                        # CPU, gloo, all shapes and layouts
    torchrun --nproc-per-node 8 benchmarks/reshard.py --worker --device cuda --shapes 0.5b --tp 4   # one row on GPUs

*Ours*: the permuted layout and the publisher. *Gather everything*: for every parameter, all ranks gather the full
training tensor in training dtype, cut their slices and write them (what `full_tensor()` and a weight loader do). Both
write into the same fused storage and are compared bit for bit afterwards. vLLM's own `load_weights` needs an engine and
is measured by benchmarks/vllm_side.py's process, not here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engines.rollout.base import EngineParameters, Part
from hybridflow.engines.train.base import Shard
from hybridflow.hybrid_engine.boxes import extents, full_box, volume, within
from hybridflow.hybrid_engine.layouts import ModelShapes, TrainingLayout, predict
from hybridflow.hybrid_engine.plan import Slice
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.hybrid_engine.shapes import model_shapes
from hybridflow.topology.parallel import ParallelDims

SHAPES = {
    # 16 heads and 4 key-value heads, so that every tp here divides; SmolLM2 itself has 9 heads and runs at tp = 1 only
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "head_dim": 36,
        "vocab_size": 49152,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "head_dim": 56,
        "vocab_size": 151936,
    },
}
LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
RESULTS = Path(__file__).parent / "results"


def shapes_of(name: str) -> ModelShapes:
    from transformers import AutoConfig

    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
    return model_shapes(AutoConfig.for_model("qwen2", **SHAPES[name], **heads))


def sides(slices: list[Slice], model: ModelShapes, rank: int, device: str, dtype: torch.dtype):
    """Random float32 shards, and empty storage, of one rank."""
    generator = torch.Generator(device).manual_seed(rank)
    shards, parts = [], []
    for piece in slices:
        box = piece.owned[rank]
        shape = model.shapes[piece.name]
        empty = tuple((0, 0) if dim == 0 else (0, size) for dim, size in enumerate(shape))
        local = torch.randn(extents(box or empty), generator=generator, device=device)
        shards.append(Shard(piece.name, local, box or empty, shape))
        if volume(piece.needed[rank]):
            storage = torch.empty(extents(piece.needed[rank]), dtype=dtype, device=device)
            parts.append(Part(piece.name, storage, piece.needed[rank], shape))
    return shards, EngineParameters(tuple(parts))


def gather_everything(slices: list[Slice], shards: list[Shard], parts: EngineParameters, world: int) -> tuple[int, int]:
    """The baseline; bytes received by this rank, and the largest full tensor held."""
    by_name = {part.hf_name: part for part in parts.parts}
    received = peak = 0
    for piece, shard in zip(slices, shards, strict=True):
        largest = max(volume(box) for box in piece.owned)
        mine = shard.local.new_zeros(largest)
        mine[: shard.local.numel()].copy_(shard.local.reshape(-1))
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        received += (world - 1) * mine.nbytes
        whole = shard.local.new_empty(shard.shape)
        for box, flat in zip(piece.owned, everyone, strict=True):
            if volume(box):
                whole[within(box, full_box(shard.shape))] = flat[: volume(box)].view(extents(box))
        peak = max(peak, whole.nbytes + world * mine.nbytes)
        if shard.name in by_name:
            part = by_name[shard.name]
            part.view.copy_(whole[within(part.hf_box, full_box(shard.shape))])
    return received, peak


def timed(action: Callable[[], object], repeats: int, device: str) -> float:
    """Median seconds of the slowest rank."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        spent = torch.tensor([time.perf_counter() - started], device=device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        seconds.append(spent.item())
    return sorted(seconds)[len(seconds) // 2]


def row(name: str, tp: int, device: str, dtype: torch.dtype, repeats: int, bucket_bytes: int) -> dict:
    """One line of the table, on every rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = shapes_of(name)
    layout = TrainingLayout.permuted(ParallelDims(dp_shard=world), tp)
    generation = ParallelDims(dp_shard=world // tp, tp=tp)
    slices = predict(model, layout, generation, dtype=str(dtype).removeprefix("torch."), itemsize=dtype.itemsize)
    place = f"cuda:{rank}" if device == "cuda" else device
    shards, parts = sides(slices, model, rank, place, dtype)
    publisher = Publisher(
        lambda: shards, lambda: parts, lambda version: None, bucket_bytes=bucket_bytes, verify="first"
    )
    started = time.perf_counter()
    metrics = publisher.publish(0)
    first = time.perf_counter() - started
    ours = timed(lambda: metrics.update(publisher.publish(1)), repeats, device)
    kept = [part.view.clone() for part in parts.parts]
    answer: list[tuple[int, int]] = []
    baseline = timed(lambda: answer.append(gather_everything(slices, shards, parts, world)), repeats, device)
    same = all(torch.equal(one, part.view) for one, part in zip(kept, parts.parts, strict=True))
    numbers: Tensor = torch.tensor([metrics["publish/bytes"], answer[0][0], float(not same)], device=place)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    received, gathered, different = numbers.tolist()
    if different:
        raise SystemExit(f"{name} N={world} t={tp}: the two ways left different weights")
    whole = sum(volume(full_box(shape)) for shape in model.shapes.values()) * dtype.itemsize
    return {
        "shapes": name,
        "N": world,
        "t": tp,
        "M (1/t - 1/N) MB": whole * (1 / tp - 1 / world) / 1e6,
        "ours MB": received / 1e6,
        "gather MB": gathered / 1e6,
        "ours s": ours,
        "gather s": baseline,
        "first publish s": first,
        "ours peak MB": metrics["publish/peak_extra_bytes"] / 1e6,
        "gather peak MB": answer[0][1] / 1e6,
    }


def worker(chosen: argparse.Namespace) -> None:
    """Runs under torchrun (or as a child of ``main``); rank 0 prints one JSON line."""
    dist.init_process_group("nccl" if chosen.device == "cuda" else "gloo")
    if chosen.device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    torch.set_num_threads(1)
    found = row(
        chosen.shapes, chosen.tp, chosen.device, getattr(torch, chosen.dtype), chosen.repeats, chosen.bucket_mb << 20
    )
    if dist.get_rank() == 0:
        print("ROW " + json.dumps(found), flush=True)
    dist.destroy_process_group()


def run_workers(world: int, name: str, tp: int, chosen: argparse.Namespace) -> dict:
    """One row, in fresh processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--worker", "--device", chosen.device, "--shapes", name, "--tp", str(tp)]
    command += ["--dtype", chosen.dtype, "--repeats", str(chosen.repeats), "--bucket-mb", str(chosen.bucket_mb)]
    children = []
    for rank in range(world):
        extra = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | {key: str(value) for key, value in extra.items()}
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"N={world} t={tp} {name}: exit codes {[child.returncode for child in children]}")
    return json.loads(next(line[4:] for line in outputs[0].splitlines() if line.startswith("ROW ")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help="this process is one rank (torchrun)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", choices=tuple(SHAPES), default=None, help="one size only")
    parser.add_argument("--tp", type=int, default=None, help="one generation tp only")
    parser.add_argument("--dtype", default="bfloat16", help="of the generator; training is float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=64)
    chosen = parser.parse_args()
    if chosen.worker:
        worker(chosen)
        return
    rows = [
        run_workers(world, name, tp, chosen)
        for name in SHAPES
        if chosen.shapes in (None, name)
        for world, tp in LAYOUTS
        if chosen.tp in (None, tp)
    ]
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    for found in rows:
        cells = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in found.values())
        lines.append("| " + " | ".join(cells) + " |")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    heading = f"# Weight transfer, {date.today()}, {machine}, {git.stdout.strip()}"
    report = "\n".join([heading, "", "    " + " ".join(["python", *sys.argv]), "", *lines, ""])
    print(report)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"reshard_{chosen.device}_{date.today()}.md").write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
