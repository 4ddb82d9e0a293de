"""Boxes and placements: chunk rule, order of cuts, agreement with torch's DTensor."""

from __future__ import annotations

import pytest
import torch

from hybridflow.hybrid_engine.boxes import (
    Replicate,
    Shard,
    StridedShard,
    chunk,
    extents,
    intersect,
    local_box,
    split,
    volume,
)


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_chunks_are_those_of_torch(length, degree):
    sizes = [part.numel() for part in torch.arange(length).chunk(degree)]
    sizes = [size for size in sizes if size] + [0] * (degree - len([size for size in sizes if size]))
    spans = [chunk((0, length), degree, index) for index in range(degree)]
    assert [high - low for low, high in spans] == sizes
    assert spans[0][0] == 0
    assert spans[-1][1] == length


def test_strided_axis_cuts_what_later_axes_have_left():
    # 8 rows, dp 2 x tp 2: tp gives rows 0..3 and 4..7, then dp halves each of them
    rows = [local_box((8,), [(2, dp, StridedShard(0, 2)), (2, tp, Shard(0))])[0] for dp in range(2) for tp in range(2)]
    assert rows == [(0, 2), (4, 6), (2, 4), (6, 8)]
    plain = [local_box((8,), [(2, dp, Shard(0)), (2, tp, Shard(0))])[0] for dp in range(2) for tp in range(2)]
    assert plain == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_a_split_factor_that_no_axis_gives_is_refused():
    with pytest.raises(ValueError, match="cut dim 0 into one of"):
        local_box((8,), [(2, 0, StridedShard(0, 4)), (2, 0, Shard(0))])


def test_different_dims_and_replication_are_independent():
    box = local_box((6, 8), [(2, 1, Replicate()), (3, 1, Shard(0)), (4, 2, Shard(1))])
    assert box == ((2, 4), (4, 6))


def test_pieces_of_a_box_are_disjoint_and_cover_it():
    box = ((3, 5), (10, 17))
    for pieces in (1, 2, 4, 8, 16):
        found = [split(box, pieces, piece) for piece in range(pieces)]
        assert sum(volume(piece) for piece in found) == volume(box)
        kept = [piece for piece in found if piece is not None]
        assert all(intersect(a, b) is None for at, a in enumerate(kept) for b in kept[:at])
    assert split((), 4, 0) == ()
    assert split((), 4, 1) is None


def test_volumes_and_intersections():
    assert volume(None) == 0
    assert volume(()) == 1
    assert extents(((1, 4), (2, 2))) == (3, 0)
    assert intersect(((0, 4), (0, 4)), ((2, 6), (3, 9))) == ((2, 4), (3, 4))
    assert intersect(((0, 4),), ((4, 8),)) is None
    assert intersect((), ()) == ()
