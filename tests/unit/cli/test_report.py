"""The picture of a run shows what its metrics say, and a wrong folder is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.cli.report import main, read_series


def _run(folder: Path, lines: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_a_picture_of_two_runs_is_written(tmp_path, capsys):
    rows = [json.dumps({"step": step, "critic/score/mean": step / 4, "perf/throughput": 10.0}) for step in range(4)]
    folders = [_run(tmp_path / name, rows) for name in ("first", "second")]
    main([*map(str, folders), "--out", str(tmp_path / "both.png")])
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert "both.png" in capsys.readouterr().out


def test_a_last_line_that_is_being_written_is_left_out(tmp_path):
    folder = _run(tmp_path, [json.dumps({"step": 1, "a": 2.0}), '{"step": 2, "a'])
    assert read_series(folder) == {"a": [(1.0, 2.0)]}


def test_a_folder_without_metrics_is_an_error_with_exit_code_two(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2 and "metrics.jsonl does not exist" in capsys.readouterr().err
