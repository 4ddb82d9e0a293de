"""Asks every node of a Ray cluster about itself and lets all of them talk to each other."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.single_controller.node import NodeProbe, NodeReport
from hybridflow.single_controller.ray_group import import_path

BYTES = 16 << 20
"""Payload of the all-reduce: long enough for bandwidth to count, short enough for a slow network."""


@dataclass(slots=True, kw_only=True)
class ClusterReport:
    """All that was found out; nodes are named by host and address, ``host (address)``."""

    nodes: dict[str, NodeReport] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    """Why a node gave no report."""
    dead: list[str] = field(default_factory=list)
    """Nodes that Ray knows and that are gone."""
    skew_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    """How far a node's clock is ahead of the driver's, and how sure that is (plus or minus)."""
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    """(from, to): why a connection failed."""
    bandwidth: dict[str, float] = field(default_factory=dict)
    """Bytes/s that every node sends in an all-reduce, by backend."""
    collective: dict[str, str] = field(default_factory=dict)
    """Why the all-reduce of a backend failed."""
    unshared: str = ""
    """Why the driver cannot use the shared folder."""


def probe_cluster(*, model: str | None, shared: str | None, timeout_s: float) -> ClusterReport:
    """The report of the cluster that this driver is connected to; ``timeout_s``: deadline of each question."""
    found = ClusterReport()
    token, found.unshared = _leave_token(shared)
    alive: dict[str, dict[str, Any]] = {}
    for node in ray.nodes():
        name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}:{node['NodeManagerPort']})"
        if node["Alive"]:
            alive[name] = node
        else:
            found.dead.append(name)
    probes = {name: _probe(node) for name, node in alive.items()}
    try:
        asked = {name: probe.report.remote(model, shared, token) for name, probe in probes.items()}
        found.nodes, found.silent = _answers(asked, timeout_s)
        probes = {name: probe for name, probe in probes.items() if name in found.nodes}
        skews = {name: _skew(probe) for name, probe in probes.items()}
        found.skew_s = {name: skew for name, skew in skews.items() if skew is not None}
        if len(probes) > 1:
            found.refused = _connections(probes, found.nodes, timeout_s)
        _all_reduce("gloo", list(probes.values()), found, timeout_s)
    finally:
        for probe in probes.values():
            ray.kill(probe)
        _remove_token(shared, token)
    if found.nodes and all(node.gpus for node in found.nodes.values()):  # not run here: needs GPUs
        counted = [_probe(alive[name], num_gpus=1) for name in found.nodes]
        try:
            _all_reduce("nccl", counted, found, timeout_s)
        finally:
            for probe in counted:
                ray.kill(probe)
    return found


def _probe(node: dict[str, Any], num_gpus: int = 0) -> Any:
    variables = {"PYTHONPATH": ":".join(import_path())}
    remote: Any = ray.remote(NodeProbe)
    return remote.options(
        num_cpus=0,
        num_gpus=num_gpus,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
        runtime_env={"env_vars": variables},
    ).remote(node["NodeManagerAddress"], sys.path)


def _answers(asked: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Answers and failures by name."""
    until = time.monotonic() + timeout_s
    answers: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name, reference in asked.items():
        try:
            answers[name] = ray.get(reference, timeout=max(0.1, until - time.monotonic()))
        except GetTimeoutError:
            failures[name] = f"no answer in {timeout_s:g} s"
        except RayError as error:
            failures[name] = _last_line(error)
    return answers, failures


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _skew(probe: Any) -> tuple[float, float] | None:
    """The tightest of five questions; None: the node has ceased to answer."""
    best = (0.0, float("inf"))
    for _ in range(5):
        before = time.time()
        try:
            theirs: Any = ray.get(probe.clock.remote(), timeout=30.0)
        except RayError:  # the questions behind it tell that it is gone (GetTimeoutError is one)
            return None
        after = time.time()
        if (after - before) / 2 < best[1]:
            best = (theirs - (before + after) / 2, (after - before) / 2)
    return best


def _connections(probes: dict[str, Any], nodes: dict[str, NodeReport], timeout_s: float) -> dict[tuple[str, str], str]:
    ports, _ = _answers({name: probe.listen.remote() for name, probe in probes.items()}, timeout_s)
    asked = {
        (one, two): probes[one].connect.remote(nodes[two].address, port, 5.0)
        for one in probes
        for two, port in ports.items()
        if one != two
    }
    answers, failures = _answers(asked, timeout_s)  # type: ignore[arg-type]
    return {pair: text for pair, text in {**answers, **failures}.items() if text}  # type: ignore[misc]


def _all_reduce(backend: str, probes: Sequence[Any], found: ClusterReport, timeout_s: float) -> None:
    if not probes:
        return
    world = len(probes)
    try:
        meeting = ray.get(probes[0].serve.remote(timeout_s), timeout=timeout_s)
        asked = [
            probe.all_reduce.remote(meeting, rank, world, backend, BYTES, timeout_s)
            for rank, probe in enumerate(probes)
        ]
        seconds = max(ray.get(asked, timeout=timeout_s))
    except GetTimeoutError:
        found.collective[backend] = f"no result in {timeout_s:g} s"
    except RayError as error:
        found.collective[backend] = _last_line(error)
    else:
        found.bandwidth[backend] = 2 * (world - 1) / world * BYTES / seconds if world > 1 else BYTES / seconds


def _leave_token(shared: str | None) -> tuple[str, str]:
    token = f".hybridflow_doctor_{uuid4().hex[:12]}"
    if shared is None:
        return token, ""
    try:
        Path(shared).mkdir(parents=True, exist_ok=True)
        (Path(shared) / token).write_text("")
    except OSError as error:
        return token, f"{error.strerror}: {error.filename}"
    return token, ""


def _remove_token(shared: str | None, token: str) -> None:
    if shared is not None:
        for path in Path(shared).glob(f"{token}*"):
            path.unlink(missing_ok=True)
