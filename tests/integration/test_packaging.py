"""An editable install, a built wheel and the bare repository all find the code, ``configs/`` and the built-in model.

Each install goes into an empty venv that sees the dependencies of this environment through a ``.pth`` file, so that
nothing is downloaded and nothing of the repository leaks in.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PARTS = ("hybridflow", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE")
WHERE = """
import importlib.metadata, importlib.resources, json, hybridflow
root = importlib.resources.files("hybridflow.configs")
def names(folder, prefix=""):
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from names(entry, prefix + entry.name + "/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name
print(json.dumps({
    "file": hybridflow.__file__,
    "configs": sorted(names(root)),
    "versions": [hybridflow.__version__, importlib.metadata.version("hybridflow")],
}))
"""


def yaml_files() -> list[str]:
    return sorted(str(path.relative_to(REPO / "configs")) for path in (REPO / "configs").rglob("*.yaml"))


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what is packaged: a build leaves folders behind."""
    copy = tmp_path / "source"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for part in PARTS:
        origin = REPO / part
        if origin.is_dir():
            shutil.copytree(origin, copy / part, ignore=ignore)
        else:
            shutil.copy(origin, copy / part)
    return copy


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an empty venv that sees the dependencies installed here (not through their .pth files)."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=tmp_path)
    interpreter = folder / "bin" / "python"
    site = Path(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


def install(python: Path, *what: str | Path, cwd: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-build-isolation", "--ignore-installed", *what, cwd=cwd)


def check(python: Path, *, cwd: Path, inside: Path) -> None:
    found = json.loads(run(python, "-P", "-c", WHERE, cwd=cwd))
    assert Path(found["file"]).is_relative_to(inside), found["file"]
    assert found["configs"] == yaml_files()
    assert found["versions"][0] == found["versions"][1]
    composed = run(python, "-P", "-m", "hybridflow.main_ppo", "--cfg", "job", cwd=cwd)
    assert "adv_estimator: grpo" in composed


def test_a_wheel_brings_code_configs_and_the_built_in_model(tmp_path, source, python):
    build = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
    run(*build, "--no-build-isolation", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    code = {str(path.relative_to(REPO)) for path in (REPO / "hybridflow").rglob("*.py")}
    model = {str(path.relative_to(REPO)) for path in (REPO / "hybridflow/data/builtin_model").glob("*.*")}
    assert not (code | model | {"hybridflow/py.typed"}) - held
    assert not [name for name in held if name.startswith(("tests/", "configs/"))]
    install(python, wheel, cwd=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    check(python, cwd=empty, inside=tmp_path / "venv")


def test_an_editable_install_finds_the_configs_of_the_source(tmp_path, source, python):
    install(python, "--editable", source, cwd=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    check(python, cwd=empty, inside=source)


def test_the_bare_repository_runs_without_being_installed(tmp_path, source, python):
    composed = run(python, "-m", "hybridflow.main_ppo", "--cfg", "job", cwd=source)
    assert "adv_estimator: grpo" in composed


def test_every_folder_of_configs_is_a_package():
    folders = {path.parent for path in (REPO / "configs").rglob("*.yaml")} | {REPO / "configs"}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_importing_hybridflow_imports_nothing_heavy():
    code = "import sys, hybridflow; print(hybridflow.__version__); print(*sys.modules)"
    version, modules = run(sys.executable, "-c", code, cwd=REPO).splitlines()
    assert version
    assert not {"torch", "numpy", "hydra", "ray", "vllm", "transformers"} & set(modules.split())
