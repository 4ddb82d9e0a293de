"""Packed attention: equal to attention of every segment alone; refuses what it cannot compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridflow.models.attention import Segments, packed_attention
from hybridflow.utils.errors import EngineError

SEGMENTS = (5, 3, 3, 3, 1)


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    n = sum(SEGMENTS)
    return tuple(torch.randn(1, heads, n, 8, generator=g) for heads in (4, 2, 2))  # type: ignore[return-value]


def alone(window: int | None = None) -> torch.Tensor:
    q, k, v = tensors()
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    outputs, start = [], 0
    for length in SEGMENTS:
        part = slice(start, start + length)
        scores = q[:, :, part] @ k[:, :, part].transpose(2, 3) / 8**0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        hidden = (distance < 0) | (distance >= (window or length))
        outputs.append(torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v[:, :, part])
        start += length
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 2, 100])
def test_every_segment_attends_to_itself_alone(window: int | None) -> None:
    out, _ = packed_attention(nn.Identity(), *tensors(), None, segments=Segments(SEGMENTS), sliding_window=window)
    torch.testing.assert_close(out, alone(window), atol=1e-6, rtol=1e-5)


def test_the_model_scale_is_used() -> None:
    q, k, v = tensors()
    out, _ = packed_attention(nn.Identity(), 2 * q, k, v, None, segments=Segments(SEGMENTS), scaling=8**-0.5 / 2)
    torch.testing.assert_close(out, alone(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 2, 4, 7, 100])
def test_a_branch_attends_to_its_prompt_and_to_itself(window: int | None) -> None:
    """A segment of 5 and two branches of 3 behind it, against whole rows of 8."""
    q, k, v = tensors()
    found, _ = packed_attention(
        nn.Identity(), q, k, v, None, segments=Segments(SEGMENTS, (-1, 0, 0, -1, 0)), sliding_window=window
    )
    for places in ([*range(8)], [*range(5), 8, 9, 10], [11, 12, 13], [*range(5), 14]):
        row = [tensor[:, :, places] for tensor in (q, k, v)]
        want, _ = packed_attention(nn.Identity(), *row, None, segments=Segments((len(places),)), sliding_window=window)
        torch.testing.assert_close(found[:, places], want, atol=1e-6, rtol=1e-5)


def test_keys_that_a_kernel_gets_for_each_segment_are_its_prompt_and_its_own() -> None:
    seen, places = Segments((2, 3, 1), (-1, 0, -1)).seen(torch.device("cpu"))
    assert seen == (2, 5, 1)
    assert places.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "does not hand its keyword arguments"),
        ({"segments": Segments((5, 3))}, "segments of 8 tokens"),
        ({"segments": Segments(SEGMENTS), "dropout": 0.1}, "dropout"),
        ({"segments": Segments(SEGMENTS), "softcap": 30.0}, "softcap"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(options: dict, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        packed_attention(nn.Identity(), *tensors(), None, **options)


def test_a_mask_beside_packed_rows_is_refused() -> None:
    with pytest.raises(EngineError, match="attention mask"):
        packed_attention(nn.Identity(), *tensors(), torch.ones(1, 15), segments=Segments(SEGMENTS))
