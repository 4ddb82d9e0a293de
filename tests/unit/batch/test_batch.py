"""Batch: named columns of one length, never changed in place."""

from __future__ import annotations

import pickle

import pytest
import torch

from hybridflow.batch.batch import Batch, concat, empty
from hybridflow.utils.errors import ColumnError


def sample() -> Batch:
    return Batch({"a": torch.arange(4), "b": torch.arange(8.0).view(4, 2), "o": ["w", "x", "y", "z"]})


def test_columns_of_unequal_length_are_refused_by_name() -> None:
    with pytest.raises(ColumnError, match="a=3, b=2"):
        Batch({"a": torch.zeros(3), "b": [1, 2]})


def test_reading_a_missing_column_names_what_is_there() -> None:
    with pytest.raises(ColumnError, match="no column 'c'.*a, b, o"):
        sample()["c"]
    with pytest.raises(ColumnError, match="objects"):
        sample()["o"]


def test_rows_take_positions_masks_and_slices_alike() -> None:
    batch = sample()
    for index in ([1, 3], torch.tensor([False, True, False, True]), slice(1, 4, 2)):
        picked = batch.rows(index)
        assert picked["a"].tolist() == [1, 3]
        assert picked.objects("o") == ("x", "z")


def test_a_row_mask_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ColumnError, match="row mask of 3 entries for 4 rows"):
        sample().rows(torch.tensor([True, False, True]))


def test_no_rows_keep_their_columns() -> None:
    none = sample().rows([])
    assert len(none) == 0
    assert none["b"].shape == (0, 2)


def test_repeat_puts_copies_side_by_side() -> None:
    assert sample().repeat(2)["a"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_split_and_concat_are_inverse() -> None:
    batch = sample()
    again = concat(batch.split([1, 0, 3]))
    assert torch.equal(again["b"], batch["b"])
    assert again.objects("o") == batch.objects("o")


def test_split_must_cover_all_rows() -> None:
    with pytest.raises(ColumnError, match="cannot split 4 rows"):
        sample().split([1, 2])


def test_concat_widens_narrow_blocks_on_the_right() -> None:
    joined = concat([Batch({"r": torch.ones(1, 2)}), Batch({"r": torch.ones(1, 3)})])
    assert joined["r"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_concat_of_different_columns_names_the_odd_one() -> None:
    with pytest.raises(ColumnError, match="q"):
        concat([Batch({"r": torch.ones(1)}), Batch({"r": torch.ones(1), "q": torch.ones(1)})])


def test_merge_accepts_equal_and_names_unequal_values() -> None:
    batch = sample()
    assert set(batch.merge(Batch({"a": torch.arange(4), "c": torch.zeros(4)})).names) == {"a", "b", "o", "c"}
    with pytest.raises(ColumnError, match="'a'.*unequal"):
        batch.merge(Batch({"a": torch.zeros(4, dtype=torch.int64)}))


def test_select_drop_and_with_columns_leave_the_original_alone() -> None:
    batch = sample()
    assert batch.select("a").names == ("a",)
    assert set(batch.drop("a", "nothing").names) == {"b", "o"}
    assert len(batch.drop("a", "b", "o")) == 4
    batch.with_columns(a=torch.zeros(4))
    assert batch["a"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ColumnError, match="no column 'q'"):
        batch.select("q")


def test_pickling_a_slice_does_not_carry_the_whole_storage() -> None:
    wide = Batch({"x": torch.zeros(10_000, 8)})
    part = wide.rows(slice(0, 1))
    again = pickle.loads(pickle.dumps(part))
    assert len(pickle.dumps(part)) < 10_000
    assert torch.equal(again["x"], part["x"])


def test_rows_iterate_as_plain_values() -> None:
    first = next(sample().iter_rows())
    assert first["a"] == 0
    assert first["b"].tolist() == [0.0, 1.0]
    assert first["o"] == "w"


def test_a_batch_without_columns_still_has_rows() -> None:
    assert len(empty(3)) == 3
    assert empty(3).names == ()
