"""Checksums: equal for equal bits in equal places, additive over blocks, different for everything else."""

from __future__ import annotations

import pytest
import torch

from hybridflow.hybrid_engine import verify
from hybridflow.hybrid_engine.boxes import full_box, within
from hybridflow.hybrid_engine.plan import Slice
from hybridflow.hybrid_engine.verify import checksum, checksums, differences

MODULUS = 1 << 64


def values(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_the_sum_of_a_partition_is_the_sum_of_the_whole(dtype):
    whole = (values(7, 6) * 10).to(dtype)
    blocks = [((0, 3), (0, 6)), ((3, 7), (0, 2)), ((3, 7), (2, 6))]
    parts = sum(checksum(whole[within(box, full_box(whole.shape))], box) for box in blocks)
    assert parts % MODULUS == checksum(whole, full_box(whole.shape)) % MODULUS


def test_cutting_into_chunks_changes_nothing(monkeypatch):
    whole = values(9, 5)
    once = checksum(whole, full_box(whole.shape))
    monkeypatch.setattr(verify, "_ELEMENTS_AT_ONCE", 12)
    assert checksum(whole, full_box(whole.shape)) == once


def test_storage_order_changes_nothing():
    whole = values(6, 4)
    assert checksum(whole.T.contiguous().T, full_box((6, 4))) == checksum(whole, full_box((6, 4)))


def test_scalars_and_vectors_have_checksums():
    assert checksum(torch.tensor(2.0), ()) != checksum(torch.tensor(3.0), ())
    assert checksum(torch.arange(4.0), ((0, 4),)) != checksum(torch.arange(4.0).flip(0), ((0, 4),))


def test_any_one_changed_bit_changes_the_sum():
    whole = values(8, 8)
    right = checksum(whole, full_box(whole.shape))
    for element in range(64):
        wrong = whole.clone()
        wrong.view(torch.int32).view(-1)[element] ^= 1
        assert checksum(wrong, full_box(whole.shape)) != right


def test_swapping_any_two_rows_changes_the_sum():
    whole = values(8, 4)
    right = checksum(whole, full_box(whole.shape))
    for one in range(8):
        for other in range(one):
            order = list(range(8))
            order[one], order[other] = other, one
            assert checksum(whole[order], full_box(whole.shape)) != right


def test_the_same_values_at_another_place_or_in_another_parameter_differ():
    block = values(2, 4)
    first = checksum(block, ((0, 2), (0, 4)))
    assert first != checksum(block, ((2, 4), (0, 4)))
    assert first != checksum(block, ((0, 2), (0, 4)), salt=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_summing_leaves_the_values_alone(dtype):
    whole = values(5, 3, dtype=dtype)
    before = whole.clone()
    checksum(whole, full_box(whole.shape))
    assert torch.equal(whole, before)


def test_no_two_swapped_elements_give_the_same_sum():
    whole = torch.arange(48.0).view(6, 8)
    right = checksum(whole, full_box(whole.shape))
    for one in range(48):
        for other in range(one):
            wrong = whole.flatten().clone()
            wrong[one], wrong[other] = whole.flatten()[other], whole.flatten()[one]
            assert checksum(wrong.view(6, 8), full_box(whole.shape)) != right


def one_rank(name, shape, dtype="float32"):
    return Slice(name, 0, dtype, getattr(torch, dtype).itemsize, (full_box(shape),), (full_box(shape),))


def test_a_stale_and_a_swapped_block_are_named_and_the_rest_is_not():
    slices = [one_rank(name, (4, 4), "bfloat16") for name in ("a.weight", "b.weight", "c.weight", "d.weight")]
    sources = {piece.name: values(4, 4, seed=at) for at, piece in enumerate(slices)}
    stored = [sources[piece.name].bfloat16() for piece in slices]
    assert (
        differences(slices, checksums(slices, sources, stored, rank=0), rank=0, group=None, device=torch.device("cpu"))
        == []
    )
    stored[1], stored[2] = stored[2], stored[1]
    stored[3] = values(4, 4, seed=9).bfloat16()
    found = differences(
        slices, checksums(slices, sources, stored, rank=0), rank=0, group=None, device=torch.device("cpu")
    )
    assert [line.split()[0] for line in found] == ["b.weight", "c.weight", "d.weight"]
    assert "generator rank 0" in found[0]
