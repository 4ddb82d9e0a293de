"""``doctor --cluster`` against real Ray nodes on this machine, sound ones and one with a planted problem."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from hybridflow.cli.cluster_doctor import judge, main, table
from hybridflow.cli.doctor import Finding
from hybridflow.single_controller.cluster_probe import ClusterReport
from hybridflow.single_controller.node import NodeReport, why_unreadable
from tests.tiny import save_tiny_model

REPO = Path(__file__).parents[3]
GIB = 1 << 30


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes, each with daemons of its own."""
    settings: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
    held = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
    held.add_node(**settings)
    held.wait_for_nodes()
    yield held
    held.shutdown()


def doctor(nodes: Cluster, *arguments: str) -> tuple[int, str]:
    """Exit code and what it printed."""
    command = [sys.executable, "-m", "hybridflow.doctor", "--cluster", "--address", nodes.address, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=REPO, env=_environment())
    return done.returncode, done.stdout + done.stderr


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def line(output: str, name: str) -> str:
    return next(text for text in output.splitlines() if text[5:20].strip() == name)


@pytest.mark.ray
@pytest.mark.slow
def test_a_sound_cluster_of_two_nodes_passes_and_a_planted_problem_is_found_on_its_node(nodes, tmp_path):
    model = save_tiny_model(tmp_path / "model")
    code, output = doctor(nodes, "--model", str(model), "--shared", str(tmp_path / "run"))
    assert code == 0, output
    assert line(output, "nodes").startswith("ok   nodes          2 answer")
    for name in ("versions", "interfaces", "ports", "clocks", "shared storage", "model"):
        assert line(output, name).startswith("ok"), output
    assert "gloo over 2 nodes" in line(output, "all-reduce glo") and "GB/s a node" in output
    assert "trainer.nnodes=2" in output
    assert list((tmp_path / "run").iterdir()) == [], "what was left to see the folder from every node is removed"

    with pytest.MonkeyPatch.context() as patch:  # Ray's daemons inherit it, and their workers from them
        patch.setenv("GLOO_SOCKET_IFNAME", "planted0")
        planted = nodes.add_node(num_cpus=1, object_store_memory=100 << 20)
    try:
        nodes.wait_for_nodes()
        code, output = doctor(nodes, "--model", str(tmp_path / "nowhere"), "--timeout", "30")
    finally:
        nodes.remove_node(planted)
    assert code == 1, output
    assert f":{planted.node_manager_port})" in line(output, "interfaces"), output
    assert "GLOO_SOCKET_IFNAME=planted0" in line(output, "interfaces")
    assert line(output, "all-reduce glo").startswith("fail"), output
    assert line(output, "model").startswith("fail") and "no folder" in line(output, "model")
    assert "-> start Ray on it with GLOO_SOCKET_IFNAME=" in output
    assert line(output, "shared storage").startswith("warn")
    assert "cannot use this cluster: 3 problem(s)" in output


def test_no_cluster_is_said_with_what_to_do(capsys):
    assert main("127.0.0.1:1", model=None, shared=None, timeout_s=5.0) == 3
    told = capsys.readouterr().out
    assert "no Ray cluster at 127.0.0.1:1" in told and "-> start it with ray start" in told


VERSIONS = {
    "python": "3.11.9", "ray": "2.60.0", "torch": "2.13.0", "cuda": "12.9", "nccl": "2.29", "vllm": "0.32.0",
    "transformers": "5.19.0", "hybridflow": "0.1",
}  # fmt: skip
SOUND = NodeReport(
    host="a",
    address="10.0.0.1",
    versions=VERSIONS,
    gpus=8,
    memory_free=100 * GIB,
    memory_total=200 * GIB,
    shared_memory_free=8 * GIB,
    disk_free=500 * GIB,
    interface="eth0",
    interfaces={"eth0": ["10.0.0.1"], "lo": ["127.0.0.1"]},
    resolved="10.0.0.1",
)


def cluster_of(**changes: Any) -> ClusterReport:
    """Two nodes, the second with ``changes``."""
    other = replace(SOUND, host="b", address="10.0.0.2", interfaces={"eth0": ["10.0.0.2"], "lo": ["127.0.0.1"]})
    return ClusterReport(
        nodes={"a": SOUND, "b": replace(other, **{"resolved": "10.0.0.2", **changes})},
        skew_s={"a": (0.0, 0.001), "b": (0.002, 0.001)},
        bandwidth={"gloo": 1e9},
    )


def problems(found: ClusterReport) -> dict[str, Finding]:
    findings = list(judge(found, model="/m", shared="/s"))
    assert all((finding.fix is None) == (finding.status == "ok") for finding in findings)
    return {finding.name: finding for finding in findings if finding.status != "ok"}


def test_two_equal_nodes_have_no_problem():
    found = cluster_of()
    assert problems(found) == {}
    assert table(found).splitlines()[2].split()[:4] == ["b", "3.11.9", "2.13.0", "12.9"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("versions", {"versions": {**VERSIONS, "nccl": "2.21"}}, ["nccl", "2.21 on b"]),
        ("interfaces", {"chosen": {"NCCL_SOCKET_IFNAME": "ib9"}}, ["NCCL_SOCKET_IFNAME=ib9 on b", "eth0"]),
        ("interfaces", {"resolved": "127.0.1.1"}, ["b: its host name resolves to 127.0.1.1"]),
        ("memory", {"memory_free": GIB}, ["1.0 GiB free on b"]),
        ("shared memory", {"shared_memory_free": 64 << 20}, ["0.1 GiB free on b"]),
        ("disk", {"disk_free": GIB // 2}, ["0.5 GiB free on b"]),
        ("shared storage", {"shared": "/s here is not the driver's"}, ["b: /s here is not"]),
        ("model", {"model": "no folder /m"}, ["b: no folder /m"]),
    ],
)
def test_a_problem_of_one_node_names_it(name, changes, words):
    found = problems(cluster_of(**changes))
    assert list(found) == [name]
    assert all(word in found[name].detail for word in words), found[name]


def test_what_nodes_cannot_do_together_is_named():
    found = cluster_of()
    found.refused = {("b", "a"): "timed out"}
    found.collective, found.bandwidth = {"gloo": "connect timeout"}, {}
    found.skew_s["b"] = (90.0, 0.01)
    found.silent = {"c": "ModuleNotFoundError: No module named 'hybridflow'"}
    named = problems(found)
    assert set(named) == {"nodes", "ports", "all-reduce glo", "clocks"}
    assert all(finding.status == "fail" for finding in named.values())
    assert named["ports"].detail == "b does not reach a: timed out"
    assert named["clocks"].detail == "b is +90.0 s off"


def test_a_clock_that_cannot_be_measured_well_is_not_blamed():
    found = cluster_of()
    found.skew_s["b"] = (3.0, 2.5)
    assert problems(found) == {}


def test_a_model_folder_without_weights_cannot_be_read(tmp_path):
    assert "no folder" in why_unreadable(tmp_path / "none")
    assert "no config.json" in why_unreadable(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "no *.safetensors" in why_unreadable(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert why_unreadable(tmp_path) == ""
