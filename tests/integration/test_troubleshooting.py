"""Every message on the pages of docs/troubleshooting is produced here, and is what the page says."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.dispatch.group import WorkerSpec
from hybridflow.engines.train import shortage
from hybridflow.engines.train.base import MicroBatching
from hybridflow.launch.findings import check_machine, fatal
from hybridflow.launch.preflight import plan_run
from hybridflow.single_controller.host import open_store
from hybridflow.single_controller.lanes import GroupSettings
from hybridflow.single_controller.local_group import LOOPBACK, LocalGroup
from hybridflow.single_controller.replicas import ReplicaGroup
from hybridflow.utils.errors import (
    DeadlineError,
    DeviceMemoryError,
    EngineError,
    LostError,
    MachineError,
    WorkerError,
)
from hybridflow.workers.out_of_memory import explained
from tests import ranks
from tests.faults.out_of_memory import memory_ends
from tests.invariants.training_steps import LOSSES, Case, build, make_rows
from tests.jobs import small_config
from tests.tiny import save_tiny_model
from tests.unit.hybrid_engine.test_publish import EMBED, HEAD, WEIGHT, Sides
from tests.unit.single_controller.contract import SPECS, WORKERS

assert ranks  # the session's preloads
PAGES = Path(__file__).parents[2] / "docs" / "troubleshooting"
MESSAGE = re.compile(r"<!-- message: ([\w ]+) -->\n```text\n(.*?)```", re.DOTALL)


def on_the_pages() -> dict[str, str]:
    """Message by name."""
    return {name: text for page in sorted(PAGES.glob("*.md")) for name, text in MESSAGE.findall(page.read_text())}


def as_pattern(text: str) -> re.Pattern[str]:
    """``text`` with its <placeholders> open and its white space free."""
    pieces = [re.escape(piece) for piece in re.split(r"<\w+>", " ".join(text.split()))]
    return re.compile(r".+?".join(pieces).replace(r"\ ", r"\s+"), re.DOTALL)


def late_start(folder: Path) -> str:
    slow = WorkerSpec(role="slow", target=f"{WORKERS}:Slow", kwargs={"seconds": 60.0})
    return error_of(DeadlineError, [slow], lambda group: group.wait_ready(), start_timeout_s=0.5)


def interface(folder: Path) -> str:
    options = {"environment": {"GLOO_SOCKET_IFNAME": "planted0"}, "collective_timeout_s": 10.0}
    return error_of(WorkerError, SPECS, lambda group: group.wait_ready(), **options)


def port(folder: Path) -> str:
    with socket.create_server((LOOPBACK, 0)) as taken, pytest.raises(MachineError) as got:
        open_store(LOOPBACK, [taken.getsockname()[1]], 1.0)
    return str(got.value)


def late_collective(folder: Path) -> str:
    meet = lambda group: group.call("echo", "meet", late=1, seconds=60.0).wait()  # noqa: E731
    return error_of(DeadlineError, SPECS, meet, collective_timeout_s=1.0)


def deadline(folder: Path) -> str:
    doze = lambda group: group.call("echo", "doze", seconds=60.0, rank=1).wait()  # noqa: E731
    return error_of(DeadlineError, SPECS, doze, deadlines={"doze": 0.5}, stack_folder=folder)


def silence(folder: Path) -> str:
    def stop(group: LocalGroup) -> None:
        os.kill(group.call("echo", "whoami").wait()[1]["pid"], signal.SIGSTOP)
        group.call("echo", "doze", seconds=0.0).wait()

    return error_of(DeadlineError, SPECS, stop, silence_s=1.0)


def death(folder: Path) -> str:
    def die(group: LocalGroup) -> None:
        pid = group.call("echo", "whoami").wait()[1]["pid"]
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        group.call("echo", "doze", seconds=60.0).wait()

    return error_of(WorkerError, SPECS, die)


def replica(folder: Path) -> str:
    group = ReplicaGroup(
        lambda number: LocalGroup(2, SPECS, GroupSettings(name="sampling"), preload=()), 1, restarts=0, name="sampling"
    )
    try:
        pid = group.call("echo", "whoami").wait()[1]["pid"]
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(LostError) as got:
            group.call("echo", "doze", seconds=60.0).wait()
        return str(got.value)
    finally:
        group.shutdown()


def error_of(kind: type[Exception], specs: Any, action: Callable[[LocalGroup], object], **settings: Any) -> str:
    """The error of ``action`` on a group of two ranks."""
    group = LocalGroup(2, specs, GroupSettings(**settings), preload=())
    try:
        if "environment" not in settings and "start_timeout_s" not in settings:
            group.wait_ready()
        with pytest.raises(kind) as got:
            action(group)
        return str(got.value)
    finally:
        group.shutdown()


def misfit(folder: Path) -> str:
    sides = Sides(generated=(EMBED, WEIGHT, HEAD))
    sides.full[WEIGHT] = torch.randn(8, 5)
    sides.full["model.norm.weight"] = torch.randn(4)
    with pytest.raises(EngineError) as got:
        sides.publisher().publish(0)
    return str(got.value)


def checksums(folder: Path) -> str:
    sides = Sides()
    sides.full[WEIGHT] = torch.randn(6, 4)
    sides.storage[WEIGHT] = sides.storage[EMBED]
    with pytest.raises(EngineError) as got:
        sides.publisher(verify="always").publish(0)
    return str(got.value)


def packed_copies(folder: Path) -> str:
    line = f"{WEIGHT} ((0, 8), (0, 4)): the engine's packed copy is not of the weights that it holds"
    with pytest.raises(EngineError) as got:
        Sides().publisher(stale_copies=lambda: [line]).publish(0)
    return str(got.value)


def retry(folder: Path) -> str:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    shortage.logger.addHandler(handler)
    try:
        with memory_ends(call=0, where="forward"):
            update(folder, MicroBatching(max_tokens=60))
    finally:
        shortage.logger.removeHandler(handler)
    return said[0]


def row(folder: Path) -> str:
    with (
        memory_ends(call=-1, where="forward", above_tokens=1),
        pytest.raises(DeviceMemoryError) as got,
        explained("update_actor", small_config(folder)),
    ):
        update(folder, MicroBatching(max_rows=1))
    return str(got.value)


def update(folder: Path, micro: MicroBatching) -> None:
    engine = build(Case(str(save_tiny_model(folder / "model"))))
    rows = make_rows(8)
    engine.update(rows, LOSSES["lm"], temperature=1.0, micro=micro, counts=engine.counts(rows))


def no_folder(folder: Path) -> str:
    config = small_config(folder, **{"actor_rollout_ref.model.path": str(folder / "nowhere")})
    return str(fatal(check_machine(config, plan_run(config))))


def no_safetensors(folder: Path) -> str:
    (save_tiny_model(folder / "model") / "model.safetensors").unlink()
    return loading_error(folder)


def missing(folder: Path) -> str:
    return changed_weights(folder, lambda weights: weights.pop("model.norm.weight"))


def shape(folder: Path) -> str:
    return changed_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))


def changed_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    path = save_tiny_model(folder / "model") / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
    return loading_error(folder)


def loading_error(folder: Path) -> str:
    with pytest.raises(MachineError) as got:
        build(Case(str(folder / "model")))
    return str(got.value)


PRODUCERS: dict[str, Callable[[Path], str]] = {
    "late start": late_start,
    "interface": interface,
    "port": port,
    "late collective": late_collective,
    "misfit": misfit,
    "checksums": checksums,
    "packed copies": packed_copies,
    "retry": retry,
    "row": row,
    "no folder": no_folder,
    "no safetensors": no_safetensors,
    "missing": missing,
    "shape": shape,
    "deadline": deadline,
    "silence": silence,
    "death": death,
    "replica": replica,
}


def test_every_message_of_the_pages_has_a_producer_and_the_other_way_round():
    assert set(on_the_pages()) == set(PRODUCERS)


@pytest.mark.parametrize("name", PRODUCERS)
def test_the_message_is_what_the_page_says(name, tmp_path):
    said = PRODUCERS[name](tmp_path)
    assert as_pattern(on_the_pages()[name]).search(said), f"page:\n{on_the_pages()[name]}\nsaid:\n{said}"


def test_a_message_that_drifts_is_noticed():
    pattern = as_pattern("role '<role>': passed its\ndeadline of <seconds> s")
    assert pattern.search("role 'actor':  passed its deadline of 3 s")
    assert not pattern.search("role 'actor': passed the deadline of 3 s")
