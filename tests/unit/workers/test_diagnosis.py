from __future__ import annotations

import logging

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.workers.diagnosis import first_bad
from tests.jobs import run_job


def rows(**columns: torch.Tensor) -> Batch:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    found = {"loss_mask": mask, "advantages": torch.zeros(2, 3), "row_index": torch.tensor([7, 4])}
    return Batch({**found, **columns})


def test_finite_rows_have_nothing_to_say():
    assert first_bad(rows(), {"log_probs": torch.zeros(2, 3)}) is None


def test_the_first_bad_row_and_column_are_named_by_the_place_in_the_batch():
    advantages = torch.zeros(2, 3)
    advantages[1, 2] = float("nan")
    found = first_bad(rows(advantages=advantages), {"log_probs": torch.full((2, 3), float("nan"))})
    assert found == "row 4 of the batch, column advantages, response token 2: nan"


def test_garbage_at_masked_positions_is_no_fault():
    advantages = torch.zeros(2, 3)
    advantages[0, 2] = float("inf")
    assert first_bad(rows(advantages=advantages)) is None


def test_when_the_columns_are_right_the_model_is_named():
    log_probs = torch.zeros(2, 3)
    log_probs[0, 1] = float("-inf")
    assert first_bad(rows(), {"log_probs": log_probs}) == (
        "row 7 of the batch, the model's log_probs, response token 1: -inf"
    )


def nan_advantages(*, token_rewards, mask, group_id, config, **columns):
    """An estimator that is wrong in one token of row 3."""
    advantages = torch.where(mask, 1.0, 0.0)
    advantages[3, 0] = float("nan")
    return advantages, advantages


def test_a_skipped_step_names_the_row_in_the_log_and_keeps_the_weights(tmp_path, caplog, monkeypatch):
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hybridflow.workers.diagnosis").addHandler(handler)
    estimator = {"algorithm.adv_estimator": f"{__name__}:nan_advantages", "trainer.total_training_steps": 1}
    (step,) = run_job(tmp_path, **estimator)
    assert step["actor/grad_skipped"] == 1.0 and step["actor/optimizer_steps"] == 2
    assert messages == [
        "actor, step 1, mini-batch 1 was skipped: row 3 of the batch, column advantages, response token 0: nan"
    ]


def loss_with_a_bad_gradient(*, log_probs, old_log_probs, advantages, mask, config, **columns):
    """Finite, with a NaN gradient: 0 * d sqrt(0)."""
    zero = (log_probs - log_probs.detach()).abs()
    return torch.where(mask, zero.sqrt() * 0.0, 0.0), {}


def test_anomaly_mode_names_the_operation(tmp_path):
    wrong = {"actor_rollout_ref.actor.policy_loss.loss_mode": f"{__name__}:loss_with_a_bad_gradient"}
    (step,) = run_job(tmp_path / "off", **wrong, **{"trainer.total_training_steps": 1})
    assert step["actor/grad_skipped"] == 2.0
    with pytest.raises(RuntimeError, match="SqrtBackward0"):
        run_job(tmp_path / "on", **wrong, **{"trainer.anomaly_detection": True})
