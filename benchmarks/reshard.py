"""Ours against gathering everything, on the same processes: bytes, seconds and memory of one weight transfer.

    python benchmarks/reshard.py --all --smollm2 FOLDER --write benchmarks/results/DATE_reshard.md   # every row
    python benchmarks/reshard.py --shapes 0.5b --world 4 --tp 2                  # CPU, gloo, into vLLM's own storage
    python benchmarks/reshard.py --storage plain --shapes 0.5b --world 4 --tp 2  # the same without vLLM
    torchrun --nproc-per-node 8 benchmarks/reshard.py --worker --device cuda --shapes 0.5b --tp 4    # one row on GPUs

Four ways to bring the same weights into the same storage; each is timed, counted and compared byte for byte:

=============  =====================================================================================================
ours           permuted layout, cast first, exact slices, two buckets (``hybrid_engine``); over a collective, and on
               CPU out of shared buckets too (no collective: the counter sees only small change)
full_tensor    every parameter gathered on every rank in training dtype (``DTensor.full_tensor``), sliced, cast, written
cast_first     the same with the cast before the gather: half the bytes for bf16
load_weights   ``full_tensor`` of every parameter handed to vLLM's own ``load_weights``: verl's FSDP path
=============  =====================================================================================================

Bytes are counted at the collective itself (a dispatch mode that sees c10d's operators), in a pass that is not timed.
Extra memory is the high-water mark of the process over what it held before (Linux), the allocator's on a GPU. CPU
seconds are those of all ranks together: unlike wall time they say the same on a busy machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.engines.rollout.base import EngineParameters, Part
from hybridflow.engines.rollout.environment import unset, variables
from hybridflow.engines.train.base import Shard as TrainShard
from hybridflow.hybrid_engine.boxes import Box, extents, full_box, volume, within
from hybridflow.hybrid_engine.layouts import ModelShapes, TrainingLayout, predict, training_table
from hybridflow.hybrid_engine.publish import Publisher
from hybridflow.hybrid_engine.rules import rule_for
from hybridflow.hybrid_engine.shapes import model_shapes
from hybridflow.topology.parallel import ParallelDims

SHAPES: dict[str, dict[str, Any]] = {
    # 16 heads and 4 key-value heads, so that every tp here divides; head sizes are those that vLLM's CPU build takes
    "135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        "model_type": "qwen3",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
"""(N, t) of the report."""
ROW_TIMEOUT_S = 300
KV_CACHE_BYTES = 16 << 20
MODEL_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Sides:
    """One rank's weights in both training layouts, and where they go."""

    permuted: list[TrainShard]
    plain: list[tuple[str, DTensor]]
    parts: EngineParameters
    load_weights: Callable[[Iterator[tuple[str, Tensor]]], object] | None
    """vLLM's loader; None: no vLLM."""


class ReceivedBytes(TorchDispatchMode):
    """Counts what this rank receives from others, at the operators that torch's collectives end in."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "c10d::alltoall_base_":
            output, _, group, output_sizes = args[:4]
            own = output_sizes[dist.get_rank(dist.ProcessGroup.unbox(group))] if output_sizes else 0
            self.total += (output.numel() - own) * output.element_size()
        elif name == "_c10d_functional::all_gather_into_tensor":
            self.total += args[0].nbytes * (args[1] - 1)
        return func(*args, **(kwargs or {}))


def folder_of(shapes: str, scratch: str) -> str:
    """A model folder with nothing but a config, or the folder that ``shapes`` names."""
    if shapes not in SHAPES:
        return shapes
    from transformers import AutoConfig

    entries = dict(SHAPES[shapes])
    config = AutoConfig.for_model(entries.pop("model_type"), **entries)
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[SHAPES[shapes]["model_type"]]]
    config.save_pretrained(scratch)
    return scratch


def whole_parameters(model: ModelShapes, device: str) -> Iterator[tuple[str, Tensor]]:
    """The same random float32 parameters on every rank, one after another."""
    generator = torch.Generator(device).manual_seed(1)
    for name, shape in model.shapes.items():
        yield name, torch.empty(shape, device=device).uniform_(-1, 1, generator=generator)


def block(whole: Tensor, box: Box | None) -> tuple[Tensor, Box]:
    """A copy of one box of a parameter; without one an empty block."""
    empty = tuple((0, 0) if dim == 0 else (0, size) for dim, size in enumerate(whole.shape))
    return whole[within(box or empty, full_box(whole.shape))].clone(), box or empty


def sides(model: ModelShapes, folder: str, chosen: argparse.Namespace, device: str) -> Sides:
    """Both training layouts filled with the same weights, and the generator's storage."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dims = ParallelDims(dp_shard=world)
    mesh = init_device_mesh(chosen.device, (world,))
    permuted, plain = [], []
    layout = TrainingLayout.permuted(dims, chosen.tp)
    for name, whole in whole_parameters(model, device):
        rule, shape = rule_for(model.architecture, name), tuple(whole.shape)
        local, box = block(whole, training_table(name, shape, layout, rule)[rank])
        permuted.append(TrainShard(name, local, box, shape))
        local, _ = block(whole, training_table(name, shape, TrainingLayout(dims=dims), rule)[rank])
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=whole.stride())
        plain.append((name, sharded))
    if chosen.storage == "vllm":
        parts, loader = vllm_storage(folder, chosen, device)
    else:
        generation = ParallelDims(dp_shard=world // chosen.tp, tp=chosen.tp)
        dtype = getattr(torch, chosen.dtype)
        needed = {piece.name: piece.needed[rank] for piece in predict(model, layout, generation)}
        parts, loader = plain_storage(model, needed, dtype, device), None
    return Sides(permuted, plain, parts, loader)


def plain_storage(
    model: ModelShapes, needed: Mapping[str, Box | None], dtype: torch.dtype, device: str
) -> EngineParameters:
    """Storage of the generator's shapes without a generator."""
    parts = [
        Part(name, torch.empty(extents(box), dtype=dtype, device=device), box, model.shapes[name])
        for name, box in needed.items()
        if box is not None and volume(box)
    ]
    return EngineParameters(tuple(parts))


def vllm_storage(folder: str, chosen: argparse.Namespace, device: str):
    """The storage of a real engine, and its own loader."""
    from hybridflow.config.actor import RolloutConfig
    from hybridflow.engines.rollout.vllm import VLLMEngine

    short = {"bfloat16": "bf16", "float32": "fp32"}[chosen.dtype]
    config = RolloutConfig(dtype=short, max_num_seqs=4, kv_cache_memory_bytes=KV_CACHE_BYTES)
    engine = VLLMEngine(
        model_path=folder,
        config=config,
        max_prompt_tokens=MODEL_LENGTH // 2,
        max_response_tokens=MODEL_LENGTH // 2,
        tp=chosen.tp,
        device=device,
        eos_token_ids=(0,),
    )
    KEPT.append(engine)
    return engine.parameters(), engine._model().load_weights


KEPT: list[Any] = []
"""Engines: dropping one would end torch.distributed."""


def gathered(sides: Sides, seconds: dict[str, float], cast: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, one after another, on every rank."""
    for name, sharded in sides.plain:
        started = time.perf_counter()
        whole = (sharded if cast is None else sharded.to(cast)).full_tensor()
        seconds["gather"] += time.perf_counter() - started
        yield name, whole


def gather_and_slice(sides: Sides, cast: torch.dtype | None = None) -> dict[str, float]:
    """Gathers everything, writes this rank's slices; seconds by phase."""
    seconds = {"gather": 0.0, "write": 0.0}
    parts: dict[str, list[Part]] = {}
    for part in sides.parts.parts:
        parts.setdefault(part.hf_name, []).append(part)
    for name, whole in gathered(sides, seconds, cast):
        started = time.perf_counter()
        for part in parts.get(name, ()):
            part.view.copy_(whole[within(part.hf_box, full_box(part.hf_shape))])
        seconds["write"] += time.perf_counter() - started
    return seconds


def gather_and_load(sides: Sides) -> dict[str, float]:
    """Gathers everything into vLLM's loader; seconds by phase."""
    assert sides.load_weights is not None
    seconds = {"gather": 0.0}
    started = time.perf_counter()
    sides.load_weights(gathered(sides, seconds, None))
    return {**seconds, "write": time.perf_counter() - started - seconds["gather"]}


def measure(action: Callable[[], Mapping[str, float]], repeats: int, device: str, parts: EngineParameters) -> dict:
    """One way: seconds of the slowest rank (median and phases), bytes and extra memory of the worst rank, checksum."""
    for part in parts.parts:
        part.view.zero_()
    with ReceivedBytes() as counter:
        action()
    checksum = sum(zlib.crc32(part.view.contiguous().view(torch.uint8).cpu().numpy()) for part in parts.parts)
    runs, cpu = [], time.process_time()
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        phases = dict(action())
        if device != "cpu":
            torch.cuda.synchronize()
        runs.append({"total": time.perf_counter() - started, **phases})
    cpu = (time.process_time() - cpu) / repeats
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = {"bytes": counter.total, "extra": extra_memory(action, device), "runs": runs, "cpu": cpu}
    dist.all_gather_object(everyone, mine)
    slowest = [max((ranks["runs"][i] for ranks in everyone), key=lambda run: run["total"]) for i in range(repeats)]
    median = sorted(slowest, key=lambda run: run["total"])[repeats // 2]
    return {
        "checksum": checksum,
        "received_bytes": max(ranks["bytes"] for ranks in everyone),
        "all_received_bytes": sum(ranks["bytes"] for ranks in everyone),
        "extra_bytes": max(ranks["extra"] for ranks in everyone),
        "seconds": median,
        "cpu_seconds": sum(ranks["cpu"] for ranks in everyone),
        "fastest": min(run["total"] for run in slowest),
        "slowest": max(run["total"] for run in slowest),
    }


def extra_memory(action: Callable[[], object], device: str) -> int:
    """Bytes of memory at the highest moment of ``action`` over those held before it."""
    dist.barrier()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else freed memory of an earlier run would be counted as held before
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident now
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def row(chosen: argparse.Namespace) -> dict:
    """All ways over one pair of layouts, on every rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    device = f"cuda:{rank}" if chosen.device == "cuda" else "cpu"
    dtype = getattr(torch, chosen.dtype)
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(chosen.shapes, scratch)
        from transformers import AutoConfig

        model = model_shapes(AutoConfig.from_pretrained(folder))
        both = sides(model, folder, chosen, device)
    bucket_bytes = chosen.bucket_mb << 20

    def publisher_over(wire: str) -> Publisher:
        return Publisher(
            lambda: both.permuted,
            lambda: both.parts,
            lambda version: None,
            bucket_bytes=bucket_bytes,
            verify="never",
            wire=wire,
        )

    def publish(publisher: Publisher) -> dict[str, float]:
        metrics = publisher.publish(1)
        return {kind: metrics[f"publish/{kind}_seconds"] for kind in ("plan", "pack", "copy", "wait", "write")}

    publisher, sharing = publisher_over("collective"), publisher_over("shared")
    started = time.perf_counter()
    first = publisher.publish(0)
    first_seconds = time.perf_counter() - started
    plan = publisher.plan
    assert plan is not None
    ways: dict[str, Callable[[], Mapping[str, float]]] = {
        "ours": lambda: publish(publisher),
        **({"ours, shared memory": lambda: publish(sharing)} if chosen.device == "cpu" else {}),
        "full_tensor": lambda: gather_and_slice(both),
        "cast_first": lambda: gather_and_slice(both, dtype),
    }
    if both.load_weights is not None:
        ways["load_weights"] = lambda: gather_and_load(both)
    found = {name: measure(way, chosen.repeats, device, both.parts) for name, way in ways.items()}
    bounds: list[Any] = [None] * world
    dist.all_gather_object(bounds, (plan.bound_bytes, {name: way.pop("checksum") for name, way in found.items()}))
    for at, (_, checksums) in enumerate(bounds):
        if len(set(checksums.values())) > 1:
            raise SystemExit(f"{chosen.shapes} N={world} t={chosen.tp} rank {at}: different weights, {checksums}")
    whole = sum(volume(full_box(shape)) for shape in model.shapes.values()) * dtype.itemsize
    return {
        "shapes": Path(chosen.shapes).name,
        "N": world,
        "t": chosen.tp,
        "storage": chosen.storage,
        "dtype": chosen.dtype,
        "model_bytes": whole,
        "closed_formula_bytes": whole * (1 / chosen.tp - 1 / world),
        "bound_bytes": max(bound for bound, _ in bounds),
        "bucket_bytes": chosen.bucket_mb << 20,
        "rounds": first["publish/rounds"],
        "first_plan_seconds": first["publish/plan_seconds"],
        "first_seconds": first_seconds,
        "ways": found,
    }


def worker(chosen: argparse.Namespace) -> None:
    """Runs under torchrun (or as a child of ``main``); rank 0 prints one JSON line."""
    dist.init_process_group("nccl" if chosen.device == "cuda" else "gloo")
    if chosen.device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    torch.set_num_threads(1)
    with torch.no_grad():
        found = row(chosen)
    if dist.get_rank() == 0:
        print("ROW " + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # an engine's own exit handlers would wait for peers that are gone


def run_workers(chosen: argparse.Namespace) -> dict:
    """One row, in fresh processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", **variables("vllm", chosen.device)}
    for name in unset("vllm", chosen.device):
        environment.pop(name, None)
    children = []
    for rank in range(chosen.world):
        place = {"RANK": rank, "WORLD_SIZE": chosen.world, "LOCAL_RANK": rank}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = environment | {key: str(value) for key, value in place.items()}
        command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
        children.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a timeout of the caller must end the ranks too
    try:
        outputs = [child.communicate()[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise SystemExit(f"exit codes {[child.returncode for child in children]}\n{outputs[0]}")
    return json.loads(next(line[4:] for line in outputs[0].splitlines() if line.startswith("ROW ")))


def table(rows: Sequence[dict]) -> str:
    """The rows as Markdown: one line per way."""
    lines = [
        "| shapes | N | t | way | received MB | over bound | s (range) | of which | CPU s | extra MB | x ours |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        ours = found["ways"]["ours"]["seconds"]["total"]
        for name, way in found["ways"].items():
            bound = found["bound_bytes"]
            over = f"{way['received_bytes'] / bound:.2f}" if bound else "-"
            phases = ", ".join(f"{kind} {spent:.2f}" for kind, spent in way["seconds"].items() if kind != "total")
            seconds = f"{way['seconds']['total']:.3f} ({way['fastest']:.3f}-{way['slowest']:.3f})"
            lines.append(
                f"| {found['shapes']} | {found['N']} | {found['t']} | {name} | {way['received_bytes'] / 1e6:.2f} "
                f"| {over} | {seconds} | {phases} | {way['cpu_seconds']:.2f} | {way['extra_bytes'] / 1e6:.0f} "
                f"| {way['seconds']['total'] / ours:.1f} |"
            )
    return "\n".join(lines)


def everything(chosen: argparse.Namespace) -> None:
    """Every row of the report; a row that fails is named and the others go on."""
    rows: list[dict] = []
    failed = []
    cases = [(shapes, *layout) for shapes in SHAPES for layout in LAYOUTS]
    cases += [(chosen.smollm2, world, 1) for world in (2, 4) if chosen.smollm2]
    for shapes, world, tp in cases:
        command = [sys.executable, __file__, "--shapes", shapes, "--world", str(world), "--tp", str(tp)]
        command += ["--device", chosen.device, "--storage", chosen.storage, "--dtype", chosen.dtype]
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            command += ["--repeats", str(chosen.repeats), "--bucket-mb", str(chosen.bucket_mb), "--rows", file.name]
            done = subprocess.run(command, check=False, timeout=ROW_TIMEOUT_S)
            if done.returncode:
                failed.append(f"{shapes} N={world} t={tp}: exit code {done.returncode}")
            else:
                rows.append(json.loads(Path(file.name).read_text()))
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    heading = f"# Weight transfer, {date.today()}, {machine}, commit {git.stdout.strip()}, torch {torch.__version__}"
    report = "\n".join([heading, "", "    python " + " ".join(sys.argv), "", table(rows), "", *failed, ""])
    print(report)
    if chosen.write is not None:
        chosen.write.write_text(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help="this process is one rank (torchrun)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", default="135m", help=f"{', '.join(SHAPES)} or a model folder")
    parser.add_argument("--world", type=int, default=4, help="processes (N)")
    parser.add_argument("--tp", type=int, default=2, help="generation tensor-parallel size (t)")
    parser.add_argument("--storage", choices=("vllm", "plain"), default="vllm", help="where weights are written")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the generator")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--rows", type=Path, help="file of JSON lines to append the row to")
    parser.add_argument("--show", type=Path, help="print the table of such a file, measure nothing")
    parser.add_argument("--all", action="store_true", help="every row, one after another, each in fresh processes")
    parser.add_argument("--smollm2", help="--all: a SmolLM2 folder, measured at tp 1")
    parser.add_argument("--write", type=Path, help="--all: file that gets the report")
    chosen = parser.parse_args()
    if chosen.show is not None:
        print(table([json.loads(line) for line in chosen.show.read_text().splitlines()]))
        return
    if chosen.worker:
        worker(chosen)
        return
    if chosen.all:
        everything(chosen)
        return
    found = run_workers(chosen)
    print(table([found]))
    if chosen.rows is not None:
        with chosen.rows.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
