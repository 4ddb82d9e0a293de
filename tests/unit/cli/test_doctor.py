from __future__ import annotations

import subprocess
import sys

import pytest

from hybridflow.cli import doctor
from hybridflow.cli.doctor import Finding, examine


def distribution(folder, name, *, module="", requires=()):
    """An installed package: ``module`` is its source."""
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_a_problem_is_printed_with_its_fix_and_ends_in_exit_code_1(capsys):
    fine = Finding(name="good", status="ok", detail="here")
    slow = Finding(name="slow", status="warn", detail="little memory", fix="close programs")
    gone = Finding(name="gone", status="fail", detail="not installed", fix="install it")
    assert examine([lambda: fine, lambda: slow]) == 0
    assert "Ready" in capsys.readouterr().out
    assert examine([lambda: gone, lambda: fine]) == 1
    printed = capsys.readouterr().out
    assert "fail gone           not installed\n" in printed
    assert "-> install it" in printed
    assert "cannot run: 1 problem" in printed


def test_every_check_answers_here_and_gives_one_fix_exactly_when_something_is_wrong():
    for check in doctor.CHECKS:
        finding = check()
        assert (finding.fix is None) == (finding.status == "ok"), finding


@pytest.mark.parametrize("package", ["torchvision", "torchcodec"])
def test_a_package_built_for_another_torch_is_named_with_its_removal(tmp_path, monkeypatch, package):
    if doctor._version(package):
        pytest.skip(f"a real {package} is installed")
    distribution(tmp_path, package, module="raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = doctor.check_clashes()
    assert finding.status == "fail"
    assert finding.fix == f"pip uninstall {package}"


def test_a_broken_pin_names_what_is_wanted_and_what_is_there(tmp_path, monkeypatch):
    needs = ["packaging==0.1", "psutil>=1", "not-there==3", "numpy==1.0; extra == 'never'"]
    distribution(tmp_path, "needs_old", requires=needs)
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = doctor._broken_pins("needs_old")
    assert len(broken) == 1
    assert broken[0].startswith("needs_old wants packaging==0.1, found ")


def test_shared_memory_names_a_segment_that_a_killed_run_left(tmp_path):
    assert doctor.check_shared_memory(str(tmp_path)).status == "ok"
    (tmp_path / "-tp:0-[0-1]-cpushm_0").touch()
    finding = doctor.check_shared_memory(str(tmp_path))
    assert finding.status == "warn"
    assert "cpushm_0" in finding.fix
    assert doctor.check_shared_memory(str(tmp_path / "none")).status == "warn"


def test_a_cache_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert doctor.check_hf_cache().status == "ok"
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file" / "home"))
    assert doctor.check_hf_cache().status == "warn"


def test_a_container_limit_counts_cached_files_as_free(tmp_path):
    for name, text in {"max": "1000", "current": "900", "stat": "anon 100\ninactive_file 700\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert doctor._cgroup_free_bytes(str(tmp_path)) == 800
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor._cgroup_free_bytes(str(tmp_path)) == float("inf")


def test_without_ray_a_cluster_is_not_asked_and_the_fix_is_told(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert doctor.main(["--cluster"]) == 1
    assert "fail ray            not installed" in capsys.readouterr().out


def test_without_torch_the_doctor_still_answers_and_fails():
    code = "import sys; sys.modules['torch'] = None; from hybridflow.cli.doctor import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "fail torch" in done.stdout
    assert "Traceback" not in done.stderr
