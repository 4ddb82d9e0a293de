"""A loss that is not finite: the run stops after so many updates in a row, and the replay names row and operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.cli import bad_update, replay
from hybridflow.utils.errors import NotFiniteError, WorkerError
from hybridflow.workers.skips import Skips
from tests.invariants.test_resume import dying_after
from tests.jobs import read_metrics, run_job, small_config

BAD_ROW = 5
CALLS: list[int] = []
FINE_CALLS = 2
"""Updates that go well."""

JOB: dict[str, Any] = {
    "data.train_batch_size": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,  # one update a step
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,  # one micro-batch an update
    "trainer.total_training_steps": 8,
    "trainer.max_skipped_updates": 3,
}


def plain(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, -(log_probs - old_log_probs).exp(), 0.0)


def late_nan_loss(*, log_probs, old_log_probs, advantages, mask, config, row_index, **columns):
    """From its third call on the square root of a negative number in one row."""
    CALLS.append(len(row_index))
    if len(CALLS) <= FINE_CALLS:
        return plain(log_probs, old_log_probs, mask), {}
    return always_nan_loss(log_probs=log_probs, old_log_probs=old_log_probs, mask=mask, row_index=row_index)


def always_nan_loss(*, log_probs, old_log_probs, mask, row_index, **columns):
    """The square root of a negative number in one row."""
    below = torch.where(row_index == BAD_ROW, -1.0, 1.0)[:, None]
    return plain(log_probs, old_log_probs, mask) * (below * log_probs.exp()).sqrt(), {}


def bad_value_gradient(*, log_probs, old_log_probs, mask, row_index, **columns):
    """Finite, with a gradient of 0 * infinity in one row."""
    zero = (log_probs - log_probs.detach()).abs()
    root = torch.where(row_index[:, None] == BAD_ROW, zero, 1.0).sqrt()
    return plain(log_probs, old_log_probs, mask) + root * 0.0, {}


def stop(folder, loss: str, **options: Any) -> str:
    """The message of the run that stops."""
    mode = {"actor_rollout_ref.actor.policy_loss.loss_mode": f"{__name__}:{loss}"}
    with pytest.raises(WorkerError) as got:
        run_job(folder, **(JOB | mode | options))
    assert isinstance(got.value.__cause__, NotFiniteError)
    return str(got.value.__cause__)


def test_a_run_stops_at_its_third_bad_update_in_a_row_and_the_replay_names_row_and_operation(tmp_path, capsys):
    CALLS.clear()
    message = stop(tmp_path, "late_nan_loss")
    folder = tmp_path / "bad_updates" / "actor_step_5_update_1"
    assert "not finite in 3 updates in a row, the last in step 5" in message
    assert f"python -m hybridflow.replay {folder}" in message
    assert [step["actor/grad_skipped"] for step in read_metrics(tmp_path)] == [0, 0, 1, 1]
    assert replay.main([str(folder)]) == 0
    told = capsys.readouterr().out
    assert "actor, step 5, update 1: 16 rows" in told
    assert f"not finite by themselves: {BAD_ROW}\n" in told
    assert "first NaN in the forward pass: aten.sqrt" in told, told[told.index("row 5") :]
    assert "in always_nan_loss" in told
    assert "SqrtBackward0" in told or "MulBackward0" in told


def test_the_replay_of_a_finite_loss_with_a_bad_gradient_names_the_operation_of_the_backward_pass(tmp_path, capsys):
    stop(tmp_path, "bad_value_gradient", **{"trainer.max_skipped_updates": 1})
    assert replay.main([str(tmp_path / "bad_updates" / "actor_step_1_update_1")]) == 0
    told = capsys.readouterr().out
    assert f"not finite by themselves: {BAD_ROW}\n" in told
    assert "first NaN" not in told
    assert "backward pass: Function 'SqrtBackward0' returned nan values" in told
    assert "in bad_value_gradient" in told


def test_a_run_that_is_started_again_goes_on_counting_its_bad_updates(tmp_path):
    mode = {"actor_rollout_ref.actor.policy_loss.loss_mode": f"{__name__}:always_nan_loss", "trainer.save_freq": 1}
    with dying_after(2):
        run_job(tmp_path, **(JOB | mode))
    assert "in 3 updates in a row, the last in step 3" in stop(tmp_path, "always_nan_loss", **mode)


@pytest.mark.parametrize("role", ["critic", "cost_critic"])
def test_the_bad_update_of_a_value_model_is_replayed_under_its_own_name(tmp_path, capsys, role):
    """Rewards, or costs, whose square is beyond float32; the other value model is fine."""
    options: dict[str, Any] = {
        "algorithm.adv_estimator": "gae",
        "actor_rollout_ref.rollout.n": 1,
        "trainer.critic_warmup": 3,
        "trainer.max_skipped_updates": 1,
    }
    if role == "critic":
        (tmp_path / "reward.py").write_text("def compute_score(*args, **kwargs):\n    return 1e20\n")
        options["reward.custom_reward_function.path"] = str(tmp_path / "reward.py")
    else:
        options |= {
            "algorithm.safe_rlhf.enable": True,
            "reward.custom_reward_function.path": str(Path(__file__).with_name("reward_with_cost.py")),
            "reward.custom_reward_function.reward_kwargs": {"price": 1e20},
        }
    with pytest.raises(WorkerError, match=rf"{role}: the loss or its gradient was not finite") as got:
        run_job(tmp_path, **(JOB | options))
    assert isinstance(got.value.__cause__, NotFiniteError)
    assert replay.main([str(tmp_path / "bad_updates" / f"{role}_step_1_update_1")]) == 0
    told = capsys.readouterr().out
    assert f"{role}, step 1, update 1: 4 rows" in told
    assert "first infinity in the forward pass: aten." in told and "value_loss.py" in told


def test_what_two_ranks_wrote_is_replayed_by_one_process(tmp_path, capsys):
    stop(tmp_path, "always_nan_loss", **{"trainer.max_skipped_updates": 2, "trainer.n_gpus_per_node": 2})
    folder = tmp_path / "bad_updates" / "actor_step_2_update_1"
    assert len(list(folder.glob("rows_*.safetensors"))) == 2
    assert replay.main([str(folder)]) == 0
    assert f"not finite by themselves: {BAD_ROW}\n" in capsys.readouterr().out


def test_an_update_that_is_finite_here_says_so(tmp_path, capsys):
    CALLS.clear()
    CALLS.extend([0] * FINE_CALLS)
    stop(tmp_path, "late_nan_loss", **{"trainer.max_skipped_updates": 1})
    CALLS.clear()
    assert replay.main([str(tmp_path / "bad_updates" / "actor_step_1_update_1")]) == 1
    assert "finite on this machine" in capsys.readouterr().out


def test_a_folder_without_an_update_is_refused(tmp_path, capsys):
    assert replay.main([str(tmp_path)]) == 2
    assert "update.json is missing" in capsys.readouterr().err


def test_a_good_update_between_bad_ones_starts_the_count_anew(tmp_path):
    skips = Skips("actor", rank=0, config=small_config(tmp_path, **{"trainer.max_skipped_updates": 2}), source={})
    nothing: Any = None
    for skipped in (True, False, True, False):
        skips.note(skipped, nothing, nothing, nothing, step=1, number=1)


def test_halving_finds_every_bad_row_and_looks_at_few():
    looked = []

    def is_bad(part):
        looked.append(len(part))
        return bool(((part["row_index"] == 3) | (part["row_index"] == 60)).any())

    assert bad_update.bad_rows(Batch({"row_index": torch.arange(64)}), is_bad) == [3, 60]
    assert len(looked) <= 4 * 6 + 1
