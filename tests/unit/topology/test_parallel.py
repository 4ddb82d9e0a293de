from __future__ import annotations

import itertools

import pytest

from hybridflow.topology.parallel import AXES, ParallelDims
from hybridflow.utils.errors import ConfigError

LAYOUTS = [
    ParallelDims(pp=pp, dp_replicate=r, dp_shard=s, sp=sp, tp=tp)
    for pp, r, s, sp, tp in itertools.product((1, 2), (1, 3), (1, 2), (1, 2), (1, 2))
]


@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_ranks_and_coordinates_are_inverse(dims):
    for rank in range(dims.world):
        at = dims.coordinates(rank)
        assert list(at) == list(AXES)
        assert dims.rank(pp=at["pp"], dp=dims.dp_coordinate(rank), sp=at["sp"], tp=at["tp"]) == rank


@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_one_rank_answers_for_every_data_parallel_coordinate(dims):
    assert [dims.dp_coordinate(rank) for rank in dims.collect_ranks()] == list(range(dims.dp))
    for rank in dims.collect_ranks():
        at = dims.coordinates(rank)
        assert (at["pp"], at["sp"], at["tp"]) == (dims.pp - 1, 0, 0)


def test_tensor_parallel_ranks_are_neighbours():
    dims = ParallelDims(dp_shard=2, sp=2, tp=2)
    assert dims.rank(tp=1) - dims.rank(tp=0) == 1


def test_a_rank_outside_the_world_and_a_degree_below_one_are_errors():
    with pytest.raises(ValueError, match="rank 8 is outside a world of 8"):
        ParallelDims(dp_shard=8).coordinates(8)
    with pytest.raises(ConfigError, match="tp=0"):
        ParallelDims(tp=0)
