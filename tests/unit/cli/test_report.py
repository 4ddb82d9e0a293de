"""The picture of a run shows what its metrics say, and a wrong folder is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib import pyplot

from hybridflow.cli.curves import PANELS, Panel, _chosen, _fill
from hybridflow.cli.report import _run_names, main, read_series


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


def test_runs_of_one_name_are_told_apart(tmp_path):
    assert _run_names([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"]) == [
        str(tmp_path / "a" / "run"),
        str(tmp_path / "b" / "run"),
        "c",
    ]


def test_a_legend_names_each_run_and_each_metric_once():
    runs = {name: {"val-core/x": [(0.0, 1.0)], "val-core/y": [(0.0, 2.0)]} for name in ("one", "two", "three")}
    _, axes = pyplot.subplots()
    _fill(axes, Panel("score", ("val-core/",)), runs)
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two", "three", "val-core/x", "val-core/y"]
    looks = [(line.get_color(), line.get_linestyle()) for line in axes.get_lines()]
    assert looks == [("C0", "-"), ("C0", "--"), ("C1", "-"), ("C1", "--"), ("C2", "-"), ("C2", "--")]


def test_a_last_line_that_is_being_written_is_left_out(tmp_path):
    folder = _run(tmp_path, [json.dumps({"step": 1, "a": 2.0}), '{"step": 2, "a'])
    assert read_series(folder) == {"a": [(1.0, 2.0)]}


def test_a_folder_without_metrics_is_an_error_with_exit_code_two(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2 and "metrics.jsonl does not exist" in capsys.readouterr().err


def test_a_kl_of_zero_throughout_is_not_drawn_and_a_score_of_zero_is():
    series = {"actor/ppo_kl": [(1.0, 0.0)], "critic/score/mean": [(1.0, 0.0)]}
    assert [panel.title for panel in PANELS if _chosen(panel, series)] == ["training score"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [([], "no step has been written yet"), (["[1]", "[2]"], "metrics.jsonl:1 is no line of metrics")],
)
def test_metrics_without_anything_to_draw_are_told(tmp_path, capsys, lines, words):
    with pytest.raises(SystemExit):
        main([str(_run(tmp_path / "run", lines))])
    assert words in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_told(tmp_path, capsys):
    run = _run(tmp_path / "run", [json.dumps({"step": 1, "perf/throughput": 1.0})])
    for out in (tmp_path / "nowhere" / "x.png", run / "x.docx"):
        with pytest.raises(SystemExit):
            main([str(run), "--out", str(out)])
        assert "error: " in capsys.readouterr().err
