"""What a cluster's operator copies: shell that parses, a manifest whose command our own loader accepts."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from hybridflow.cli.ppo import main

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("script", ["scripts/ray_node.sh", "examples/cluster/slurm.sh"])
def test_the_shell_parses(script):
    subprocess.run(["bash", "-n", str(REPO / script)], check=True)


def test_the_manifest_names_a_command_that_the_loader_accepts(capsys):
    job = yaml.safe_load((REPO / "examples/cluster/rayjob.yaml").read_text())
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "hybridflow.main_ppo"]
    assert main([*words[3:], "trainer.device=cpu", "--dry-run"]) == 0
    assert "the configuration is sound" in capsys.readouterr().out


def test_the_manifest_sets_the_health_checks_of_the_node_script():
    job = yaml.safe_load((REPO / "examples/cluster/rayjob.yaml").read_text())
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    given = {entry["name"]: entry["value"] for entry in head["env"]}
    script = (REPO / "scripts/ray_node.sh").read_text()
    for name, value in given.items():
        if name.startswith("RAY_health_check"):
            assert f"{name}:-{value}}}" in script
