"""``python -m hybridflow.doctor --cluster``: every node of a Ray cluster, and whether they work together.

Prints a table of nodes, then every check with one fix per problem. Exit codes: 0 a run can use this cluster, 1 it
cannot, 3 no cluster is reached.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from hybridflow.cli.doctor import MEMORY_FAIL_GIB, MEMORY_WARN_GIB, SHARED_MEMORY_WARN_GIB, Finding
from hybridflow.cli.front import BAD_MACHINE, FAILED, OK
from hybridflow.single_controller.cluster import start_ray, stop_ray
from hybridflow.single_controller.cluster_probe import ClusterReport, probe_cluster
from hybridflow.single_controller.node import NodeReport
from hybridflow.utils.errors import MachineError

MUST_MATCH = ("python", "ray", "torch", "cuda", "nccl", "vllm", "transformers", "hybridflow")
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0
"""Clocks order the failures of several ranks and the files of checkpoints."""
DISK_FAIL_GIB, DISK_WARN_GIB = 1.0, 20.0
SLOW_BYTES_PER_S = 100e6
"""Below this an all-reduce between nodes is worth a warning: a 1 Gbit/s network gives 117 MB/s."""
GIB = float(2**30)


def main(address: str, *, model: str | None, shared: str | None, timeout_s: float) -> int:
    """Joins the cluster, asks, prints; the exit code."""
    try:
        cluster = start_ray({"address": address})
    except MachineError as error:
        print(
            f"fail cluster        {error}\n{'':<20}-> start it with ray start, or give --address HOST:PORT of its head"
        )
        return BAD_MACHINE
    try:
        found = probe_cluster(
            model=model, shared=None if shared is None else str(Path(shared).resolve()), timeout_s=timeout_s
        )
    finally:
        stop_ray(cluster)
    print(table(found), end="\n\n")
    failed = 0
    for finding in judge(found, model=model, shared=shared):
        failed += finding.status == "fail"
        print(f"{finding.status:<5}{finding.name:<15}{finding.detail}")
        if finding.fix is not None:
            print(f"{'':<20}-> {finding.fix}")
    print(f"\nA run cannot use this cluster: {failed} problem(s) above." if failed else "\nReady: trainer.nnodes="
          f"{len(found.nodes)} ray_kwargs.ray_init.address={address}")  # fmt: skip
    return FAILED if failed else OK


def table(found: ClusterReport) -> str:
    """One line per node."""
    head = ("node", "python", "torch", "cuda", "nccl", "vllm", "GPUs", "memory free", "disk free", "clock")
    rows: list[tuple[str, ...]] = [head]
    for name, node in found.nodes.items():
        skew, sure = found.skew_s.get(name, (0.0, 0.0))
        rows.append(
            (
                name,
                *(node.versions[key] for key in ("python", "torch", "cuda", "nccl", "vllm")),
                str(node.gpus),
                f"{node.memory_free / GIB:.1f} GiB",
                f"{node.disk_free / GIB:.0f} GiB",
                f"{skew:+.3f} s (+-{sure:.3f})",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def judge(found: ClusterReport, *, model: str | None, shared: str | None) -> Iterator[Finding]:
    """Every check in the order of printing; a problem names its nodes and one fix."""
    yield _nodes(found)
    yield _versions(found.nodes)
    yield _interfaces(found.nodes)
    yield _ports(found)
    for backend in ("gloo", "nccl"):
        if backend in found.bandwidth or backend in found.collective:
            yield _collective(found, backend)
    yield _clocks(found)
    yield _memory(found.nodes)
    yield _shared_memory(found.nodes)
    yield _disk(found.nodes)
    if shared is not None:
        yield _shared(found, shared)
    elif len(found.nodes) > 1:
        fix = "give --shared FOLDER, the trainer.default_local_dir of your run: checkpoints of all nodes go there"
        yield Finding(name="shared storage", status="warn", detail="not checked", fix=fix)
    if model is not None:
        yield _model(found.nodes, model)


def _nodes(found: ClusterReport) -> Finding:
    if found.silent:
        detail = "; ".join(f"{name}: {why}" for name, why in found.silent.items())
        fix = "install hybridflow and its packages at the same place on every node: bash scripts/install.sh"
        return Finding(name="nodes", status="fail", detail=detail, fix=fix)
    count = f"{len(found.nodes)} answer"
    if found.dead:
        fix = "restart the cluster where these nodes should still be part of it"
        return Finding(name="nodes", status="warn", detail=f"{count}; gone: {', '.join(found.dead)}", fix=fix)
    return Finding(name="nodes", status="ok", detail=count)


def _versions(nodes: Mapping[str, NodeReport]) -> Finding:
    differing = []
    for name in MUST_MATCH:
        held = {node: report.versions[name] for node, report in nodes.items()}
        if len(set(held.values())) > 1:
            usual = Counter(held.values()).most_common(1)[0][0]
            others = "; ".join(f"{version} on {node}" for node, version in held.items() if version != usual)
            differing.append(f"{name} {usual}, but {others}")
    if differing:
        fix = "install the same versions on every node (bash scripts/install.sh), or mount one environment everywhere"
        return Finding(name="versions", status="fail", detail="; ".join(differing), fix=fix)
    return Finding(name="versions", status="ok", detail="equal on all nodes")


def _interfaces(nodes: Mapping[str, NodeReport]) -> Finding:
    problems, fixes = [], []
    apart = len({node.address for node in nodes.values()}) > 1  # nodes of one machine may meet on loopback
    for name, node in nodes.items():
        for variable, value in node.chosen.items():
            wanted = value.lstrip("^=").split(",")
            if not value.startswith("^") and not any(i.startswith(w) for w in wanted for i in node.interfaces):
                problems.append(f"{variable}={value} on {name}, which has {', '.join(sorted(node.interfaces))}")
                fixes.append(f"start Ray on it with {variable}={node.interface or 'the interface of its address'}")
        if not node.interface:
            problems.append(f"{name}: no interface holds {node.address}")
            fixes.append("start Ray there with --node-ip-address of an interface that is up")
        elif apart and not node.chosen.get("GLOO_SOCKET_IFNAME") and _misleads(node):
            problems.append(f"{name}: its host name resolves to {node.resolved or 'nothing'}, which gloo would offer")
            fixes.append(f"start Ray on it with GLOO_SOCKET_IFNAME={node.interface}")
    if problems:
        return Finding(name="interfaces", status="fail", detail="; ".join(problems), fix=fixes[0])
    detail = ", ".join(sorted({node.interface for node in nodes.values()}))
    return Finding(name="interfaces", status="ok", detail=f"{detail} carries the cluster's address")


def _misleads(node: NodeReport) -> bool:
    """Whether gloo, which asks the host name where it is, would tell its peers an address that only it can reach."""
    own = ipaddress.ip_address(node.address).is_loopback
    return not own and (not node.resolved or ipaddress.ip_address(node.resolved).is_loopback)


def _ports(found: ClusterReport) -> Finding:
    if found.refused:
        (one, two), why = next(iter(found.refused.items()))
        more = f" (and {len(found.refused) - 1} more pairs)" if len(found.refused) > 1 else ""
        fix = "open all TCP ports between the nodes: ranks meet on ports that the kernel picks"
        return Finding(name="ports", status="fail", detail=f"{one} does not reach {two}: {why}{more}", fix=fix)
    if len(found.nodes) < 2:
        return Finding(name="ports", status="ok", detail="one node: nothing to reach")
    return Finding(name="ports", status="ok", detail="every node reaches every other")


def _collective(found: ClusterReport, backend: str) -> Finding:
    name = f"all-reduce {backend}"[:14]
    if backend in found.collective:
        variable = "NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
        fix = f"see docs/troubleshooting/collectives.md; usual: the wrong interface, set {variable} before ray start"
        return Finding(name=name, status="fail", detail=found.collective[backend], fix=fix)
    rate = found.bandwidth[backend]
    detail = f"{backend} over {len(found.nodes)} nodes, {rate / 1e9:.2f} GB/s a node"
    if rate < SLOW_BYTES_PER_S and len(found.nodes) > 1:
        fix = "choose the fast network with GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME before ray start"
        return Finding(name=name, status="warn", detail=detail, fix=fix)
    return Finding(name=name, status="ok", detail=detail)


def _clocks(found: ClusterReport) -> Finding:
    worst, (skew, sure) = max(found.skew_s.items(), key=lambda item: abs(item[1][0]), default=("", (0.0, 0.0)))
    distance = max(0.0, abs(skew) - sure)
    detail = f"within {abs(skew):.3f} s of the driver's"
    if distance > SKEW_WARN_S:
        status = "fail" if distance > SKEW_FAIL_S else "warn"
        fix = f"synchronise the clock of {worst}: chronyc makestep, or timedatectl set-ntp true"
        return Finding(name="clocks", status=status, detail=f"{worst} is {skew:+.1f} s off", fix=fix)
    return Finding(name="clocks", status="ok", detail=detail)


def _memory(nodes: Mapping[str, NodeReport]) -> Finding:
    free = {name: node.memory_free / GIB for name, node in nodes.items()}
    return _least("memory", free, MEMORY_FAIL_GIB, MEMORY_WARN_GIB, "end other programs on {node}")


def _shared_memory(nodes: Mapping[str, NodeReport]) -> Finding:
    free = {name: node.shared_memory_free / GIB for name, node in nodes.items()}
    fix = "start the container on {node} with --shm-size=8g (or more)"
    return _least("shared memory", free, 0.0, SHARED_MEMORY_WARN_GIB, fix)


def _disk(nodes: Mapping[str, NodeReport]) -> Finding:
    free = {name: node.disk_free / GIB for name, node in nodes.items()}
    return _least("disk", free, DISK_FAIL_GIB, DISK_WARN_GIB, "free space on {node}: checkpoints go there")


def _least(name: str, free: Mapping[str, float], fail: float, warn: float, fix: str) -> Finding:
    node, least = min(free.items(), key=lambda item: item[1], default=("", 0.0))
    detail = f"at least {least:.1f} GiB free"
    if least < warn:
        status = "fail" if least < fail else "warn"
        return Finding(name=name, status=status, detail=f"{least:.1f} GiB free on {node}", fix=fix.format(node=node))
    return Finding(name=name, status="ok", detail=detail)


def _shared(found: ClusterReport, folder: str) -> Finding:
    problems = [f"{name}: {node.shared}" for name, node in found.nodes.items() if node.shared]
    problems += [f"driver: {found.unshared}"] if found.unshared else []
    if problems:
        fix = f"mount one file system at {folder} on every node, writable for the user that runs Ray"
        return Finding(name="shared storage", status="fail", detail="; ".join(problems), fix=fix)
    return Finding(name="shared storage", status="ok", detail=f"{folder} is one folder on all nodes")


def _model(nodes: Mapping[str, NodeReport], model: str) -> Finding:
    problems = [f"{name}: {node.model}" for name, node in nodes.items() if node.model]
    if problems:
        fix = "copy the model to the same path on every node, or put it on shared storage"
        return Finding(name="model", status="fail", detail="; ".join(problems), fix=fix)
    return Finding(name="model", status="ok", detail=f"{model} is readable on all nodes")
