from __future__ import annotations

import pytest

from hybridflow.topology.parallel import ParallelDims
from hybridflow.topology.resources import Pool, generation_layout, training_layout
from hybridflow.utils.errors import ConfigError


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("shard", [-1, 1, 2, 64])
def test_a_training_layout_uses_every_rank_once(world, tp, sp, shard):
    if world % (tp * sp) or (0 < shard < world // (tp * sp) and world // (tp * sp) % shard):
        with pytest.raises(ConfigError):
            training_layout(world, sp=sp, tp=tp, shard=shard)
        return
    dims = training_layout(world, sp=sp, tp=tp, shard=shard)
    assert dims.world == world
    assert dims.dp_shard == (dims.dp if shard == -1 else min(shard, dims.dp))


def test_zero_stage_0_replicates():
    assert training_layout(8, tp=2, zero_stage=0) == ParallelDims(dp_replicate=4, tp=2)


def test_replicas_of_the_generator_follow_from_the_devices():
    assert generation_layout(8, tp=2) == ParallelDims(dp_shard=4, tp=2)
    with pytest.raises(ConfigError, match="tp=3 does not divide 8"):
        generation_layout(8, tp=3)


def test_the_world_of_a_pool_is_the_sum_of_its_slots():
    assert Pool(name="main", slots=(8, 8, 4), roles=("actor",)).world == 20
