from __future__ import annotations

from hybridflow.cli.combinations import combinations_page, pairs_of_estimator_and_loss, refusal


def test_the_validator_is_what_is_asked():
    assert refusal({}) is None
    assert "needs at least 2" in (refusal({"actor_rollout_ref.rollout.n": 1}) or "")


def test_every_estimator_combines_with_every_loss_as_the_page_says():
    assert pairs_of_estimator_and_loss() == []


def test_every_no_of_the_page_has_a_reason():
    page = combinations_page()
    table, reasons = page.split("## Why")
    assert 0 < table.count("| **no**") <= sum(line.split(": ")[0].count(" + ") for line in reasons.splitlines())
