"""Remote columns: whatever is done to references gives what the same does to values."""

from __future__ import annotations

import random

import pytest
import torch

from hybridflow.batch import refs
from hybridflow.batch.batch import Batch, concat
from hybridflow.batch.refs import Bytes, Kept, Reader, RemoteColumn
from hybridflow.dispatch.transfer import split_rows
from hybridflow.utils.errors import ColumnError


class Held(Kept):
    def read(self) -> Bytes:
        self.token[1] += 1
        return self.token[0]


class Shelf:
    """Objects in this process, with how often each was read."""

    def __init__(self) -> None:
        self.objects: list[list] = []

    def put(self, data: Bytes) -> Kept:
        data.flags.writeable = False  # as shared memory is
        self.objects.append([data, 0])
        return self.open(self.objects[-1], data.size, "the shelf")

    def open(self, token: object, size: int, owner: str) -> Kept:
        return Held(token, size, owner)

    @property
    def reads(self) -> int:
        return sum(reads for _, reads in self.objects)


def sample(rows: int, width: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        {
            "n": torch.randint(100, (rows,), generator=generator),
            "ids": torch.randint(1, 1000, (rows, width), generator=generator),
            "response_mask": torch.rand(rows, width, generator=generator) < 0.7,
            "logp": torch.randn(rows, width, generator=generator).to(torch.bfloat16),
            "deep": torch.randn(rows, width, 3, generator=generator),
            "fixed": torch.randn(rows, 2, generator=generator, dtype=torch.float64),
            "text": [f"{seed}-{i}" for i in range(rows)],
        }
    )


def same(one: Batch, other: Batch) -> None:
    assert len(one) == len(other) and set(one.names) == set(other.names)
    mine, theirs = one.tensors(), other.tensors()
    for name in theirs:
        assert mine[name].dtype == theirs[name].dtype and mine[name].shape == theirs[name].shape, name
        assert torch.equal(mine[name], theirs[name]), name
    assert one.objects("text") == other.objects("text")


@pytest.mark.parametrize("seed", range(40))
def test_any_sequence_of_operations_on_references_gives_what_it_gives_on_values(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refs, "OBJECT_BYTES", random.Random(seed).choice([40, 300, 1 << 20]))
    draw, shelf = random.Random(seed), Shelf()
    plain = [sample(draw.randint(0, 6), draw.randint(1, 5), i) for i in range(4)]
    remote = [batch.kept(shelf) for batch in plain]
    pairs = list(zip(plain, remote, strict=True))
    for _ in range(8):
        value, reference = draw.choice(pairs)
        move = draw.choice(["rows", "mask", "repeat", "concat", "split", "pad", "clear", "select", "merge", "replace"])
        if move == "rows" and len(value):
            index = [draw.randrange(len(value)) for _ in range(draw.randint(0, 7))]
            pairs.append((value.rows(index), reference.rows(index)))
        elif move == "mask":
            mask = torch.tensor([draw.random() < 0.5 for _ in range(len(value))], dtype=torch.bool)
            pairs.append((value.rows(mask), reference.rows(mask)))
        elif move == "repeat":
            pairs.append((value.repeat(2), reference.repeat(2)))
        elif move == "concat":
            others = [pair for pair in pairs if set(pair[0].names) == set(value.names)]
            chosen = [draw.choice(others) for _ in range(draw.randint(1, 3))]
            pairs.append((concat([pair[0] for pair in chosen]), concat([pair[1] for pair in chosen])))
        elif move == "split":
            cut = draw.randint(0, len(value))
            sizes = [cut, len(value) - cut]
            pairs.extend(zip(value.split(sizes), reference.split(sizes), strict=True))
        elif move == "pad":
            pairs.extend(zip(split_rows(value, 3), split_rows(reference, 3), strict=True))
        elif move == "clear":
            start = draw.randint(0, len(value))
            names = ("n", "response_mask", "deep")
            pairs.append((value.cleared(start, *names), reference.cleared(start, *names)))
        elif move == "select":
            names = [name for name in value.names if draw.random() < 0.7 or name == "text"]
            pairs.append((value.select(*names), reference.select(*names)))
        elif move == "merge":
            pairs.append((value.merge(value.drop("deep")), reference.merge(reference.drop("deep"))))
        elif move == "replace":
            texts = [f"{word}!" for word in value.objects("text")]
            pairs.append((value.with_columns(text=texts), reference.with_columns(text=texts)))
    assert shelf.reads == 0, "indexing read bytes"
    for value, reference in pairs:
        same(reference, value)


def test_wide_columns_become_references_and_others_stay() -> None:
    kept = sample(3, 4).kept(Shelf())
    columns = kept.columns()
    assert {name for name, value in columns.items() if isinstance(value, RemoteColumn)} == {
        "ids", "response_mask", "logp", "deep", "fixed",
    }  # fmt: skip
    assert "ids[3, 4](remote)" in repr(kept)
    assert kept.kept(Shelf()) is kept and kept["n"].shape == (3,)


def test_a_consumer_reads_the_objects_of_its_rows_once_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refs, "OBJECT_BYTES", 64)  # eight rows of one int64 column an object
    shelf, reader = Shelf(), Reader()
    batch = Batch({"ids": torch.arange(64).view(64, 1)}).kept(shelf)
    assert len(shelf.objects) == 8
    mine = batch.rows([9, 8, 9, 31])
    assert mine.fetched(reader)["ids"].flatten().tolist() == [9, 8, 9, 31]
    assert [reads for _, reads in shelf.objects] == [0, 1, 0, 1, 0, 0, 0, 0]
    assert (reader.read_bytes, reader.over_fetched_bytes) == (128, 128 - 3 * 8)


def test_small_columns_share_an_object_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    sample(6, 4).kept(shelf)
    assert len(shelf.objects) == 1
    monkeypatch.setattr(refs, "OBJECT_BYTES", 100)
    again = Shelf()
    sample(6, 4).kept(again)
    assert len(again.objects) > 3 and all(data.size <= 100 for data, _ in again.objects)


def test_columns_that_came_together_share_their_places() -> None:
    shelf = Shelf()
    batch = concat([sample(3, 4).kept(shelf), sample(2, 5, 1).kept(shelf)]).rows([4, 0, 0])
    places = {id(value.places) for value in batch.columns().values() if isinstance(value, RemoteColumn)}
    assert len(places) == 1


def test_rows_that_are_dropped_drop_their_objects() -> None:
    batch = concat([sample(3, 4).kept(Shelf()), sample(2, 4, 1).kept(Shelf())])
    column = batch.rows([3, 4]).columns()["ids"]
    assert isinstance(column, RemoteColumn) and len(column.blocks) == 1


def test_what_is_read_may_be_written() -> None:
    kept = sample(3, 4).kept(Shelf())
    kept["ids"][0] = 7
    assert kept["ids"][0, 0] != 7


def test_values_and_references_join_and_unequal_ones_do_not_merge() -> None:
    one, two = sample(3, 4), sample(2, 6, 1)
    same(concat([one.kept(Shelf()), two]), concat([one, two]))
    same(concat([one, two.kept(Shelf())]), concat([one, two]))
    with pytest.raises(ColumnError, match="'ids'.*unequal"):
        one.kept(Shelf()).merge(sample(3, 4, 2).kept(Shelf()).select("ids"))
    same(one.kept(Shelf()).merge(one.kept(Shelf())), one)


def test_a_gradient_stays_with_its_tensor() -> None:
    assert Batch({"w": torch.ones(2, 2, requires_grad=True)}).kept(Shelf())["w"].requires_grad


def test_a_batch_is_read_in_one_go_for_each_kind_of_object() -> None:
    asked: list[list[str]] = []

    class Seen(Held):
        def read_with(self, others):
            asked.append([kept.owner for kept in (self, *others)])
            return super().read_with(others)

    class Library(Shelf):
        def open(self, token: object, size: int, owner: str) -> Kept:
            return Seen(token, size, f"volume {len(self.objects)}")

    shelf, library = Shelf(), Library()
    batches = [sample(4, 3, seed) for seed in range(4)]
    joined = concat([batch.kept(store) for batch, store in zip(batches, (library, shelf) * 2, strict=True)])
    same(joined.fetched(), concat(batches))
    assert asked == [["volume 1", "volume 2"]]
    assert shelf.reads == 2 and library.reads == 2, "each object once"
    assert joined.readable(Kept) is joined
    mixed = joined.readable(Seen)
    assert mixed.nbytes() > joined.nbytes()
    same(mixed, concat(batches))
