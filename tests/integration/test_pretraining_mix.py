"""PPO-ptx in the main job: the loss on text is mixed into every update of the actor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.problems import InvalidConfigError
from hybridflow.utils.errors import WorkerError
from tests.jobs import run_job, small_config


def text_file(folder: Path) -> str:
    """Sums that are wrong in the same way: learning them shows in the loss on text."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"{i}+{i}=7"}) + "\n" for i in range(40)))
    return str(file)


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"algorithm.ptx_coef": 1.0, "algorithm.ptx_files": [text_file(folder)], **more}


def test_the_loss_on_text_falls_when_it_is_mixed_in(tmp_path):
    steps = run_job(tmp_path / "run", **options(tmp_path, **{"trainer.total_training_steps": 6}))
    assert [step["actor/optimizer_steps"] for step in steps] == [2] * 6
    assert steps[-1]["actor/ptx_loss"] < 0.8 * steps[0]["actor/ptx_loss"]


def test_the_first_policy_loss_is_that_of_a_run_without_text(tmp_path):
    """Rows of text change no count and no term of the policy loss (one optimizer step: weights were equal before)."""
    one = {"trainer.total_training_steps": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 8}
    plain = run_job(tmp_path / "plain", **one)[0]
    mixed = run_job(tmp_path / "mixed", **options(tmp_path, **one))[0]
    for name in ("actor/pg_loss", "actor/ppo_kl", "critic/score/mean"):
        assert mixed[name] == pytest.approx(plain[name], abs=1e-6)
    assert mixed["actor/grad_norm"] != plain["actor/grad_norm"]


def test_a_txt_file_and_sizes_of_ones_own(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("1+2=3" * 50)
    sizes = {"algorithm.ptx_files": [str(file)], "algorithm.ptx_batch_size": 3, "algorithm.ptx_length": 5}
    steps = run_job(tmp_path / "run", **options(tmp_path, **sizes))
    assert all(math.isfinite(step["actor/ptx_loss"]) and step["actor/grad_skipped"] == 0 for step in steps)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"algorithm.ptx_files": []}, "ptx_files=\\[\\]: is empty"),
        ({"algorithm.ptx_coef": 0.0}, "ptx_coef=0: gives the loss"),
        ({"algorithm.ptx_files": ["text.parquet"]}, "a file of text is expected"),
        ({"actor_rollout_ref.rollout.temperature": 0.7}, "temperature=0.7"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, more, message):
    with pytest.raises(InvalidConfigError, match=message):
        small_config(tmp_path, **options(tmp_path, **more))


def test_files_without_text_are_an_error_that_names_the_place(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"txt": "1+1=2"}\n')
    with pytest.raises(WorkerError, match=r"bad.jsonl row 0: a text in the key 'text'"):
        run_job(tmp_path / "run", **options(tmp_path, **{"algorithm.ptx_files": [str(bad)]}))
