from __future__ import annotations

import pickle
import threading

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.refs import Kept
from hybridflow.single_controller.wire import pack, unpack


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_a_tensor_arrives_as_it_left(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    arrived = unpack(pack(value))
    assert arrived.dtype == dtype
    assert torch.equal(arrived, value)


def test_views_travel_without_their_storage_and_arrive_writable() -> None:
    whole = torch.arange(100_000)
    data = pack({"part": whole[::50_000].t(), "rows": whole[:4].view(2, 2).t()})
    assert len(data) < 1_000
    arrived = unpack(data)
    assert arrived["rows"].tolist() == [[0, 2], [1, 3]]
    arrived["part"] += 1
    assert arrived["part"].tolist() == [1, 50_001]


def test_tensors_with_gradient_keep_it() -> None:
    assert unpack(pack(torch.ones(2, requires_grad=True))).requires_grad


def test_a_batch_arrives_with_all_its_columns() -> None:
    batch = Batch({"x": torch.arange(3), "mask": torch.ones(3, 2, dtype=torch.bool), "text": ["a", {"b": 1}, None]})
    arrived = unpack(pack(batch))
    assert arrived.objects("text") == ("a", {"b": 1}, None)
    assert torch.equal(arrived["x"], batch["x"])
    assert len(arrived) == 3


def test_what_cannot_travel_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        pack(threading.Lock())


class Noted(Kept):
    def read(self):
        raise AssertionError("travelling reads nothing")


@pytest.mark.parametrize("beside", [None, []])
def test_a_reference_travels_as_its_token_and_arrives_once(beside: list | None) -> None:
    kept, other = Noted("place", 7, "me"), Noted("elsewhere", 8, "you")
    data = pack({"one": kept, "again": [kept], "other": other}, beside)
    assert beside in (None, ["place", "elsewhere"])
    arrived = unpack(data, Noted, beside)
    assert arrived["one"] is arrived["again"][0] and arrived["one"] is not kept
    assert (arrived["one"].token, arrived["one"].size, arrived["one"].owner) == ("place", 7, "me")
    assert arrived["other"].token == "elsewhere"
    with pytest.raises(pickle.UnpicklingError):
        unpack(data)
