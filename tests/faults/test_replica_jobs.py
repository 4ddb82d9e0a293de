"""A replica of a generator that is killed costs a run time and nothing else: no restart of it, and not one bit.

The trainers live on: what they have learned since the last checkpoint is neither lost nor done again.
"""

from __future__ import annotations

import os
import random
import re
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from hybridflow.single_controller import health
from hybridflow.utils.errors import LostError
from tests import ranks
from tests.faults.kills import Kill, killing
from tests.invariants.test_resume import GRPO, STEPS, assert_same_end, tensors
from tests.jobs import run_job

APART: dict[str, Any] = GRPO | {
    "trainer.pools": {"sampling": {"slots": [2], "roles": ["rollout"]}},
    "actor_rollout_ref.rollout.checkpoint_engine.verify": "always",
}
FIRST, SECOND = "sampling.0", "sampling.1"
COUNTER = "rollout/replica_restarts"
MAY_DIFFER = (COUNTER, "perf/fetched_bytes", "perf/over_fetch_bytes")
"""What a replica has read is not counted when it dies."""


@pytest.fixture(autouse=True)
def preloaded() -> None:
    """Ranks are forked from a server that has imported what they need: the session's, or the first job's would be."""
    assert ranks
    forkserver.ensure_running()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two replicas that nobody disturbed."""
    assert ranks
    forkserver.ensure_running()
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    rows = run_job(folder, **APART)
    assert [row[COUNTER] for row in rows if COUNTER in row] == [0.0] * STEPS
    return folder


def vllm_apart(tp: int) -> dict[str, Any]:
    """Two vLLM replicas of ``tp`` ranks each."""
    return APART | {
        "trainer.controller": "ray",
        "trainer.pools": {"sampling": {"slots": [2 * tp], "roles": ["rollout"]}},
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": tp,
    }


def assert_nothing_is_left(killed: list[int], children: set[int]) -> None:
    assert health.wait_gone(killed, timeout_s=0.0) == []
    helpers = {forkserver._forkserver._forkserver_pid}
    assert not set(health.descendants([os.getpid()])) - children - helpers
    pids = {str(pid) for pid in killed}
    assert not [path.name for path in Path("/dev/shm").iterdir() if pids & set(re.findall(r"\d+", path.name))]


def test_replicas_killed_in_generation_in_publish_and_between_change_nothing(tmp_path, undisturbed, capsys):
    """Numbers count calls of that replica: two validations (four calls) and step 1 come before its sixth generation."""
    kills = (
        Kill("publish", 1, rank=0, group=FIRST),  # before it ever held weights
        Kill("generate_sequences", 2, rank=0, group=SECOND),  # in a validation
        Kill("generate_sequences", 4, rank=0, group=FIRST, delay_s=0.02),
        Kill("publish", 4, rank=0, group=SECOND),
        Kill("update_actor", 4, rank=0, group="main", victim=FIRST),  # while nobody asks for it
    )
    children = set(health.descendants([os.getpid()]))
    with killing(*kills) as killed:
        rows = run_job(tmp_path / "again", **APART)
    assert_nothing_is_left(killed, children)
    assert_same_end(undisturbed, tmp_path / "again", but=MAY_DIFFER)
    assert rows[-1][COUNTER] == len(kills)
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows}), "the run itself was not restarted"
    assert "replica 1 of group 'sampling' is started again (1 of 3)" in capsys.readouterr().err


def test_a_replica_that_has_died_too_often_ends_the_run_and_is_named(tmp_path):
    kills = (Kill("generate_sequences", n, rank=0, group=SECOND) for n in (1, 2))
    with (
        killing(*kills),
        pytest.raises(
            LostError, match=r"replica 1 of group 'sampling' is lost and no restart is left: (.|\n)*rank 0 of 1 \(node"
        ),
    ):
        run_job(tmp_path, **APART | {"trainer.max_replica_restarts": 1})


@pytest.mark.ray
@pytest.mark.parametrize(
    "kill",
    [
        Kill("generate_sequences", 1, rank=0, group="sampling"),
        pytest.param(Kill("publish", 2, rank=0, group="sampling"), marks=pytest.mark.slow),
    ],
    ids=["generation", "publish"],
)
def test_a_replica_on_ray_that_is_killed_leaves_the_weights_of_one_process(tmp_path, cluster, kill):
    """One trainer and one replica on the cluster's two slots, against both in one process without Ray."""
    assert cluster
    two_steps = GRPO | {
        "trainer.threads_per_worker": 1,
        "trainer.total_training_steps": 2,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
    }
    on_ray = two_steps | {
        "trainer.controller": "ray",
        "trainer.pools": {"sampling": {"slots": [1], "roles": ["rollout"]}},
    }
    with killing(kill) as killed:
        rows = run_job(tmp_path / "ray", **on_ray)
    assert rows[-1][COUNTER] == 1
    assert health.wait_gone(killed, timeout_s=0.0) == []
    run_job(tmp_path / "one", **two_steps)
    one, two = (tensors(tmp_path / name / "global_step_2" / "actor") for name in ("one", "ray"))
    assert one.keys() == two.keys()
    assert [name for name in one if not one[name].equal(two[name])] == []


HANGING = (
    Kill("generate_sequences", 4, rank=0, group=FIRST, stops=True),
    Kill("publish", 4, rank=0, group=SECOND, stops=True),
    Kill("publish", 6, rank=0, group=FIRST, stops=True),
)
SHORT = {f"trainer.timeouts.{phase}_s": 12.0 for phase in ("generate", "publish")}
SILENCE = {"trainer.timeouts.silence_s": 8.0, "trainer.timeouts.publish_s": 60.0}
"""With half of ``publish_s`` trainers give up on a replica that was noticed long before."""


@pytest.mark.slow
@pytest.mark.parametrize("limits", [SHORT, SILENCE], ids=["deadline", "silence"])
def test_replicas_that_hang_in_generation_and_publish_change_nothing(tmp_path, undisturbed, limits):
    """They are stopped; a deadline or silence_s passes; they are killed and replaced, the trainers having given up."""
    children = set(health.descendants([os.getpid()]))
    with killing(*HANGING) as stopped:
        rows = run_job(tmp_path / "again", **APART | limits)
    assert_nothing_is_left(stopped, children)
    assert_same_end(undisturbed, tmp_path / "again", but=MAY_DIFFER)
    assert rows[-1][COUNTER] == len(HANGING)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_vllm_replica_that_hangs_changes_nothing(tmp_path, tp, capsys):
    """As the test of those that are killed; of two ranks one is stopped, and its peer waits for it."""
    options = vllm_apart(tp)
    long = {"trainer.timeouts.silence_s": 20.0, "trainer.timeouts.publish_s": 60.0}
    kills = (
        Kill("generate_sequences", 4, rank=tp - 1, group=FIRST, stops=True),
        Kill("publish", 4, rank=tp - 1, group=SECOND, stops=True),
    )
    with killing(*kills) as stopped:
        rows = run_job(tmp_path / "again", **options | long)
    assert rows[-1][COUNTER] == 2
    told = capsys.readouterr().err
    assert "generate_sequences hangs" in told and "publish hangs" in told
    assert health.wait_gone(stopped, timeout_s=0.0) == []
    run_job(tmp_path / "whole", **options)
    assert_same_end(tmp_path / "whole", tmp_path / "again", but=MAY_DIFFER)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_kills_at_random_moments_change_nothing(tmp_path, undisturbed, seed):
    """Eight kills of either replica, anywhere in generations, publishes, updates, and where it is joined again."""
    chosen = random.Random(seed)
    calls = [("generate_sequences", 9), ("publish", 6), ("step_costs", 5), ("begin_step", 5)]
    kills = {
        (method, number, group): Kill(
            method, number, rank=0, group=group, delay_s=chosen.choice([0.0, chosen.uniform(0, 0.05)])
        )
        for method, last in calls
        for group in (FIRST, SECOND)
        for number in chosen.sample(range(1, last + 1), 1)
    }
    children = set(health.descendants([os.getpid()]))
    with killing(*kills.values()) as killed:
        rows = run_job(tmp_path / "again", **APART | {"trainer.max_replica_restarts": 10})
    assert_nothing_is_left(killed, children)
    assert_same_end(undisturbed, tmp_path / "again", but=MAY_DIFFER)
    assert rows[-1][COUNTER] >= 4


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_vllm_replica_that_is_killed_changes_nothing(tmp_path, tp):
    """Two replicas of one rank, or of two of which one dies; on a Ray of the run's own."""
    options = vllm_apart(tp)
    kills = (
        Kill("generate_sequences", 4, rank=tp - 1, group=FIRST, delay_s=0.1),
        Kill("publish", 4, rank=tp - 1, group=SECOND),
    )
    with killing(*kills) as killed:
        rows = run_job(tmp_path / "again", **options)
    assert rows[-1][COUNTER] == 2
    assert health.wait_gone(killed, timeout_s=0.0) == []
    run_job(tmp_path / "whole", **options)
    assert_same_end(tmp_path / "whole", tmp_path / "again", but=MAY_DIFFER)
