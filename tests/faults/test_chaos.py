"""Everything at once, from one seed, ends as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.faults.chaos import assert_every_prompt_once as once
from tests.faults.chaos import compare, disturbed, undisturbed

SHORT = {"worker": 1, "driver": 1}
HERE = {"worker": 9, "driver": 4, "slow reward": 1, "nan reward": 1, "full disk": 1, "damaged checkpoint": 1}
OVER_NODES = {"node": 3, "ray worker": 3, "ray driver": 1}
"""Together 20 kills, and four other troubles."""


def test_two_kills_at_random_moments_change_nothing(tmp_path):
    disturbed(tmp_path, seed=3, steps=6, counts=SHORT)
    undisturbed(tmp_path, 6)
    compare(tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("seed", "steps", "counts"),
    [(11, 42, HERE), pytest.param(12, 18, OVER_NODES, marks=pytest.mark.ray)],
    ids=["two ranks", "two nodes of Ray"],
)
def test_twenty_kills_and_four_other_troubles_change_nothing(tmp_path, seed, steps, counts):
    disturbed(tmp_path, seed=seed, steps=steps, counts=counts)
    undisturbed(tmp_path, steps)
    compare(tmp_path, steps)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_ten_kills_change_nothing_where_vllm_generates(tmp_path):
    disturbed(tmp_path, seed=13, steps=20, counts={"worker": 7, "driver": 3}, rollout="vllm")
    undisturbed(tmp_path, 20, "vllm")
    compare(tmp_path, 20)


def test_the_ledger_notices_a_prompt_that_was_used_twice(tmp_path):
    """Negative control: step 2 of an epoch is replaced by its step 1."""
    for step in range(1, 7):
        rows = "".join(f'{{"prompt": "{step if step != 2 else 1}-{i // 2}"}}\n' for i in range(8))
        (tmp_path / f"step_{step}.jsonl").write_text(rows)
    for step in range(7, 13):
        rows = "".join(f'{{"prompt": "{step - 6}-{i // 2}"}}\n' for i in range(8))
        (tmp_path / f"step_{step}.jsonl").write_text(rows)
    with pytest.raises(AssertionError, match="lost or used twice"):
        once(tmp_path, 12)
