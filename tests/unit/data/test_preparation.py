"""The preparation scripts and the real-model example, as far as they go without real weights."""

import os
import subprocess
import sys
from pathlib import Path

from hybridflow.config.data import DataConfig
from hybridflow.data.sources import read_sources
from tests.tiny import save_tiny_model

REPO = Path(__file__).resolve().parents[3]


def test_gsm8k_files_become_rows_that_load(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text('{"question": "How many?", "answer": "3 + 4 = 7 <<3+4=7>>\\n#### 1,007"}\n')
    command = [sys.executable, REPO / "scripts/prepare_gsm8k.py", "--in", raw, "--out", tmp_path / "out"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(REPO)})
    (row,) = read_sources([str(tmp_path / "out/test.parquet")], DataConfig(), seed=0, held_out=True)
    assert (row.data_source, row.ground_truth) == ("openai/gsm8k", "1007")
    assert row.prompt[0]["content"].startswith("How many? Let's think")
    assert row.extra_info["split"] == "test"


def test_the_smollm2_example_is_a_sound_configuration(tmp_path):
    model = save_tiny_model(tmp_path / "model", family="llama")
    environment = {**os.environ, "PYTHON": sys.executable, "MODEL": str(model)}
    command = [
        "bash",
        "examples/smollm2_arithmetic/run.sh",
        "--dry-run",
        f"trainer.default_local_dir={tmp_path / 'out'}",
    ]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the configuration is sound" in done.stdout
    assert "basic_arithmetic" in done.stdout
