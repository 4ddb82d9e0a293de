"""Where a run goes on from, what a checkpoint holds and which stay: every choice, in the main job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from hybridflow.engines.train.shards import read_index
from hybridflow.trainer.checkpoint import POINTER
from hybridflow.trainer.run import Run
from hybridflow.utils.errors import ConfigError, WorkerError
from tests.invariants.test_resume import dying_after, lines, tensors
from tests.jobs import read_metrics, run_job

RUN: dict[str, Any] = {
    "trainer.total_training_steps": 4,
    "trainer.save_freq": 1,
    "actor_rollout_ref.actor.optim.lr": 1e-4,
}
CONTENTS = "actor_rollout_ref.actor.checkpoint."


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def test_disable_starts_anew_and_a_later_auto_takes_the_new_run(tmp_path):
    run_job(tmp_path, **RUN)
    with dying_after(2):
        run_job(tmp_path, **RUN, **{"trainer.resume_mode": "disable", "trainer.seed": 5})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert (tmp_path / "metrics.old-1.jsonl").exists(), "the lines of the run before are not lost"
    run_job(tmp_path, **RUN, **{"trainer.seed": 5})
    run_job(tmp_path / "whole", **RUN, **{"trainer.seed": 5})
    assert lines(tmp_path) == lines(tmp_path / "whole")


def test_resume_path_goes_on_from_any_checkpoint_in_another_folder(tmp_path):
    run_job(tmp_path / "first", **RUN)
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": f"{tmp_path / 'first'}/global_step_2"}
    run_job(tmp_path / "second", **RUN, **path)
    assert [row["step"] for row in read_metrics(tmp_path / "second")] == [3, 4]
    assert lines(tmp_path / "second") == lines(tmp_path / "first")[2:]


def test_resume_path_takes_a_url(tmp_path):
    fsspec.filesystem("memory").store.clear()
    run_job(tmp_path / "first", **RUN, **{"trainer.checkpoint_copy": "memory://first"})
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "memory://first/global_step_2"}
    run_job(tmp_path / "second", **RUN, **path)
    assert lines(tmp_path / "second") == lines(tmp_path / "first")[2:]


def test_a_named_checkpoint_that_is_not_whole_is_refused_in_words(tmp_path):
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / "nothing")}
    with pytest.raises(ConfigError, match=r"trainer\.resume_from_path: checkpoint .*nothing cannot be used: manifest"):
        run_job(tmp_path / "run", **RUN, **path)


def test_a_changed_key_is_named_when_the_run_goes_on(tmp_path, capfd):
    with dying_after(1):
        run_job(tmp_path, **RUN)
    run_job(tmp_path, **RUN, **{"algorithm.gamma": 0.9, "trainer.log_val_generations": 1})
    told = capfd.readouterr().err
    assert "2 keys differ" in told and "algorithm.gamma" in told and "changes the run" in told
    assert "trainer.log_val_generations" in told and "no effect on results" in told


def test_the_last_step_is_trained_validated_and_saved_once_whatever_the_cadence(tmp_path, capfd):
    """Fault G07: five steps, two to a checkpoint, validation at the fifth; an epoch has three."""
    cadence = {"trainer.total_training_steps": 5, "trainer.save_freq": 2, "trainer.test_freq": 5}
    misspelt = {"trainer.best_metric": "val-core/hybridflow/arithmetic/reward/maen@1"}
    rows = run_job(tmp_path, **RUN | cadence | misspelt, **{"data.generated_size": 24})
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert steps_in(tmp_path) == [2, 4, 5]
    assert [row["step"] for row in rows if any(name.startswith("val-core/") for name in row)] == [5]
    told = (
        "maen@1 is no metric of step 5, so none is the best. Did you mean val-core/hybridflow/arithmetic/reward/mean@1"
    )
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_every_mth_and_the_best_stay(tmp_path, overlap):
    keep = {
        "trainer.total_training_steps": 6,
        "trainer.max_actor_ckpt_to_keep": 1,
        "trainer.keep_every": 4,
        "trainer.best_metric": "-training/global_step",  # the lowest is the first
        f"{CONTENTS}async_save": overlap,
    }
    run_job(tmp_path, **RUN | keep)
    assert steps_in(tmp_path) == [1, 4, 6]
    assert (tmp_path / POINTER).read_text() == "6\n"


def test_a_save_in_the_background_is_complete_before_the_next_step_ends(tmp_path, monkeypatch):
    """Or the next save would wait for its digests. Steps are slowed down: on a busy machine these end too soon."""
    complete: list[bool] = []
    after, took = Run.after, Run.took

    def looking(run: Run, step: int) -> None:
        complete.append((tmp_path / f"global_step_{step - 1}").exists())
        after(run, step)

    def unhurried(run: Run, name: str, seconds: float) -> None:
        time.sleep(0.1)
        took(run, name, seconds)

    monkeypatch.setattr(Run, "after", looking)
    monkeypatch.setattr(Run, "took", unhurried)
    run_job(tmp_path, **RUN | {f"{CONTENTS}async_save": True})
    assert complete[1:] == [True] * 3


def test_the_export_is_what_transformers_reads(tmp_path):
    options = {
        f"{CONTENTS}save_contents": ["model", "optimizer", "extra", "hf_model"],
        "critic.checkpoint.save_contents": ["model", "hf_model"],
        "algorithm.adv_estimator": "gae",
        "trainer.save_freq": 4,
    }
    run_job(tmp_path, **RUN | options)
    folder = tmp_path / "global_step_4"
    saved = tensors(folder / "actor")
    model = AutoModelForCausalLM.from_pretrained(folder / "actor" / "huggingface", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[f"model/{name}"]), name
    assert AutoTokenizer.from_pretrained(folder / "actor" / "huggingface").encode("1+1=")
    AutoModelForTokenClassification.from_pretrained(folder / "critic" / "huggingface")
    assert not any(name.startswith("optim/") for name in read_index(str(folder / "critic")))


def test_a_checkpoint_may_hold_the_export_alone(tmp_path):
    run_job(tmp_path, **RUN | {f"{CONTENTS}save_contents": ["hf_model"], "trainer.save_freq": 4})
    assert sorted(path.name for path in (tmp_path / "global_step_4" / "actor").iterdir()) == ["huggingface"]


def test_loading_what_was_not_saved_says_which_key_to_change(tmp_path):
    with dying_after(2):
        run_job(tmp_path, **RUN, **{f"{CONTENTS}save_contents": ["model", "extra"]})
    with pytest.raises(WorkerError, match=r"saved without optimizer: leave that out of checkpoint\.load_contents"):
        run_job(tmp_path, **RUN)
    run_job(tmp_path, **RUN, **{f"{CONTENTS}load_contents": ["model", "extra"]})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_the_manifest_says_which_versions_and_layout_wrote_it_and_its_step_how_long_it_took(tmp_path):
    run_job(tmp_path, **RUN | {"trainer.save_freq": 4})
    timed = [row["step"] for row in read_metrics(tmp_path) if "timing_s/save_checkpoint" in row]
    assert timed == [4], "what a checkpoint took stands in the line of its own step"
    manifest = json.loads((tmp_path / "global_step_4" / "manifest.json").read_text())
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["layout"] == {"nnodes": 1, "n_gpus_per_node": 1}
