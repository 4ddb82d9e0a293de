from __future__ import annotations

import pytest

from hybridflow.config.actor import ActorConfig, RefConfig
from hybridflow.config.critic import CriticConfig


@pytest.mark.parametrize("section", [ActorConfig, RefConfig, CriticConfig])
@pytest.mark.parametrize(("stage", "reshard"), [(None, True), (1, False), (2, False), (3, True)])
def test_a_zero_stage_says_whether_layers_are_gathered_twice(section, stage, reshard):
    assert section(zero_stage=stage).sharding.reshard_after_forward is reshard
