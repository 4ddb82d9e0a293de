"""What a reward function says beside its score becomes metrics."""

from __future__ import annotations

import math

import pytest

from hybridflow.trainer.metrics import reward_parts


def test_means_are_over_the_rows_that_have_a_number_of_that_name():
    rows = [{"right": 1.0, "note": "x"}, {"right": 0.0, "format": True}, {"failure": "late"}, {"format": math.nan}]
    assert reward_parts(rows) == {"right": pytest.approx(0.5), "format": pytest.approx(1.0)}
