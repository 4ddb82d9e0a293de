"""One update that was not finite, run again: whole, in halves, and operation by operation (``cli/replay.py``)."""

from __future__ import annotations

import copy
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.batch.batch import Batch
from hybridflow.cli.front import BAD_CONFIG, FAILED, OK
from hybridflow.config.load import load_config
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.dispatch.group import RankContext
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.errors import ConfigError, DataError, MachineError
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.diagnosis import first_bad
from hybridflow.workers.skips import MODEL, WEIGHTS, BadUpdate, read_bad_update

Worker = ActorWorker | CriticWorker

MAX_ROWS = 8
"""Rows that are named; what makes one row bad often makes all."""
SHOWN_CHARACTERS = 120
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", f"python{sys.version_info[0]}.{sys.version_info[1]}/")


def replay_folder(folder: Path, model_path: str | None = None) -> int:
    """The exit code of a replay of the update in ``folder``; prints what was found."""
    try:
        update = read_bad_update(folder)
        worker = rebuild(update, model_path)
    except (ConfigError, DataError, MachineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_CONFIG
    return replay(update, worker)


def rebuild(update: BadUpdate, model_path: str | None = None) -> Worker:
    """The role's worker on one CPU rank with the weights of the update and a learning rate of 0.

    ``model_path`` stands in for the folder that the run read.
    """
    tree = copy.deepcopy(dict(update.config))
    tree["trainer"] |= {"device": "cpu"}
    tree["actor_rollout_ref"]["actor"] |= {"use_torch_compile": False}
    tree["actor_rollout_ref"]["actor"]["optim"]["lr"] = tree["critic"]["optim"]["lr"] = 0.0
    config = load_config(tree)
    source = dict(update.source) | ({"model_path": model_path} if model_path else {})
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    context = RankContext(rank=0, world=1, local_rank=0, node="", device="cpu", threads=torch.get_num_threads())
    arguments: dict[str, Any] = {"config": config, "dims": ParallelDims(), "total_steps": 1, **source}
    worker: Worker
    if update.role == "actor":
        if config.actor_rollout_ref.actor.use_kl_loss and config.needs_exact_kl:
            raise DataError("a loss with the exact KL needs the reference beside the actor: it cannot be replayed yet")
        worker = ActorWorker(context, rollout_tp=1, **arguments)
    else:
        worker = CriticWorker(context, role=update.role, **arguments)
    worker.engine.load(str(update.folder / WEIGHTS), contents=MODEL)
    return worker


def replay(update: BadUpdate, worker: Worker) -> int:
    """Prints whether the fault is here too, its rows and its operations; the exit code."""
    rows = update.rows
    print(
        f"{update.role}, step {update.step}, update {update.number}: {len(rows)} rows, "
        f"{update.counts.tokens} tokens to learn from"
    )
    metrics = worker.update_once(rows, update.counts)
    print(f"here: loss {metrics['loss']:g}, gradient norm {metrics['grad/norm']:g}")
    if not metrics["grad/skipped"]:
        print("The update is finite on this machine. What differs: device, kernels, number of ranks, dtype of sums")
        return FAILED
    guilty = bad_rows(rows, lambda part: bool(worker.update_once(part, update.counts)["grad/skipped"]))
    if not guilty:
        print("No row is at fault by itself: the sum over rows is what overflows")
        tell(rows, "all rows together", update, worker)
        return OK
    more = f" (the first {MAX_ROWS})" if len(guilty) == MAX_ROWS else ""
    print(f"Rows that are not finite by themselves: {', '.join(str(number_of(rows, at)) for at in guilty)}{more}")
    for at in guilty:
        tell(rows.rows([at]), f"row {number_of(rows, at)}", update, worker)
    return OK


def bad_rows(rows: Batch, is_bad: Callable[[Batch], bool]) -> list[int]:
    """Positions of rows that are bad alone, ascending, at most ``MAX_ROWS``; halves that are fine are not looked at."""
    found: list[int] = []
    waiting = [range(len(rows))]
    while waiting and len(found) < MAX_ROWS:
        part = waiting.pop()
        if len(part) == 0 or not is_bad(rows.rows(list(part))):
            continue
        if len(part) == 1:
            found.append(part[0])
            continue
        middle = len(part) // 2
        waiting += [part[middle:], part[:middle]]
    return found


def number_of(rows: Batch, at: int) -> int:
    """Number of a row in the batch of its step."""
    return int(rows["row_index"][at])


def tell(rows: Batch, name: str, update: BadUpdate, worker: Worker) -> None:
    """Prints what is bad about ``rows``: text, column, and the operations at which it begins."""
    print(f"\n{name}")
    if len(rows) == 1:
        for label, text in _texts(rows, update).items():
            print(f"  {label}: {text}")
    found = first_bad(rows)
    if found is not None:
        print(f"  column: {found}")
    watch = watched(lambda: worker.update_once(rows, update.counts))
    for line in watch.lines():
        print(f"  {line}")


def _texts(rows: Batch, update: BadUpdate) -> Mapping[str, str]:
    path = update.source.get("tokenizer_path") or update.source["model_path"]
    prompt = rows["prompt_ids"][0][-int(rows["prompt_length"][0]) :].tolist()
    response = rows["response_ids"][0][: int(rows["response_length"][0])].tolist()
    try:
        tokenizer = load_tokenizer(path)
    except (ConfigError, DataError, MachineError, OSError):  # replay needs no text
        return {"prompt ids": _shortened(str(prompt)), "response ids": _shortened(str(response))}
    texts = tokenizer.decode_responses([prompt, response])
    return {"prompt": _shortened(repr(texts[0])), "response": _shortened(repr(texts[1]))}


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."


@dataclass(slots=True)
class Findings:
    """Where numbers first ceased to be finite."""

    forward: dict[str, str] = field(default_factory=dict)
    """``nan`` and ``inf``: the first operation that made one out of finite numbers, and the line that called it."""
    backward: str | None = None
    """What autograd's anomaly detection said."""
    place: str | None = None
    """The line of the forward pass whose gradient it is."""

    def lines(self) -> list[str]:
        """For a person."""
        told = []
        if "nan" in self.forward:
            told.append(f"first NaN in the forward pass: {self.forward['nan']}")
        elif "inf" in self.forward:
            told.append(f"first infinity in the forward pass: {self.forward['inf']}")
        if self.backward is not None:
            told.append(f"backward pass: {self.backward}" + (f", called at {self.place}" if self.place else ""))
        return told or ["the operations are finite one by one: a sum of them overflows"]


def watched(update: Callable[[], object]) -> Findings:
    """Runs ``update`` with every operation of the forward pass looked at and autograd's anomaly detection on."""
    found = Findings()
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        try:
            with _Watch(found):
                update()
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            found.backward = str(error).splitlines()[0]
    for warning in caught:
        text = str(warning.message)
        if "Traceback of forward call" in text:
            found.place = _own_line(text)
    return found


class _Watch(TorchDispatchMode):
    """Looks at what every operation returns until its first NaN and infinity are found."""

    def __init__(self, found: Findings) -> None:
        super().__init__()
        self._found = found
        self._busy = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A backward pass is anomaly detection's part; memory that is not written yet may hold anything.
        if torch._C._current_graph_task_id() != -1 or "empty" in func.name():
            return result
        for kind, is_kind in (("nan", torch.isnan), ("inf", torch.isinf)):
            if kind in self._found.forward or not _any(result, is_kind):
                continue
            if not _any((args, kwargs), torch.isfinite, negated=True):
                self._found.forward[kind] = f"{func} at {_caller()}"
        return result


def _any(values: Any, test: Callable[[Tensor], Tensor], *, negated: bool = False) -> bool:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            hits = test(value)
            if bool((~hits if negated else hits).any()):
                return True
        elif isinstance(value, float) and negated and (value != value or value in (float("inf"), float("-inf"))):
            return True
    return False


def _caller() -> str:
    """The innermost line that is neither torch's nor Python's nor this file's."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and not any(part in frame.filename for part in _LIBRARIES):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "an unknown place"


def _own_line(text: str) -> str | None:
    """The innermost line of a printed traceback that is neither a library's nor this file's."""
    lines = text.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number].strip()
        if line.startswith('File "') and __file__ not in line and not any(part in line for part in _LIBRARIES):
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            return f"{line.removeprefix('File ')}: {code}"
    return None
