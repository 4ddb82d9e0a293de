from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.cli.config_keys import main, pages

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


PAGES = ["../algorithms/combinations.md", "config_keys.md", "configuration.md", "metrics.md"]


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_the_generated_one(name):
    made = pages()[name]
    assert (REFERENCE / name).read_text(encoding="utf-8") == made, (
        "run: python -m hybridflow.config_keys --write docs/reference"
    )


def test_writing_makes_all_pages(tmp_path):
    assert main(["--write", str(tmp_path / "reference")]) == 0
    assert sorted(pages()) == PAGES
    assert all((tmp_path / "reference" / name).is_file() for name in PAGES)


def test_one_answer_per_asked_key(capsys):
    assert main(["data.train_batch_size", "actor_rollout_ref.actor.veomni.param_offload"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("data.train_batch_size: honoured")
    assert "refused: use" in second


def test_an_unknown_key_is_said_to_be_unknown(capsys):
    assert main(["data.train_batchsize"]) == 1
    assert "did you mean data.train_batch_size?" in capsys.readouterr().out
