"""Drawing and norms of the CPU engine, judged by plain float64 loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.engines.rollout.vllm_cpu_kernels import CHUNK, draw, uniforms

pytestmark = pytest.mark.vllm


def test_uniforms_differ_by_request_and_position_and_are_evenly_spread() -> None:
    seeds, positions = np.meshgrid(np.arange(300) * 7919, np.arange(300))
    drawn = uniforms(seeds.ravel(), positions.ravel())
    assert drawn.min() >= 0 and drawn.max() < 1
    assert len(np.unique(drawn)) == drawn.size
    grid = drawn.reshape(300, 300)
    for neighbours in (grid[:, 1:] - grid[:, :-1], grid[1:] - grid[:-1]):
        assert abs(np.mean(neighbours)) < 0.005  # 90,000 differences of two uniforms: 6 standard errors are 0.008
        assert abs(np.mean(np.abs(neighbours)) - 1 / 3) < 0.005
    share = np.bincount((drawn * 64).astype(int), minlength=64) / drawn.size
    assert np.abs(share * 64 - 1).max() < 0.15  # 1,406 a bin: 5.6 sigma


@pytest.mark.parametrize("width", [5, CHUNK, CHUNK + 1, 5 * CHUNK - 3])
def test_a_draw_is_where_the_cumulative_sum_passes_the_point(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    probabilities = torch.softmax(3 * torch.randn(200, width, generator=generator), -1)
    probabilities[:, ::3] = 0  # tokens cut by top-k or top-p
    points = torch.rand(200, generator=generator, dtype=torch.float64)
    points[:3] = torch.tensor([0.0, 0.5, 1 - 2.0**-52], dtype=torch.float64)
    drawn = draw(probabilities, points)
    for row, point, token in zip(probabilities.double(), points.tolist(), drawn.tolist(), strict=True):
        ends = row.cumsum(0) / row.sum()
        assert row[token] > 0
        # chunk sums are float64 of float32 values: the place differs from the plain sum's by rounding only
        assert ends[token] >= point - 1e-12 and ends[token] - row[token] / row.sum() <= point + 1e-12


def test_a_row_with_all_its_mass_on_one_token_gives_that_token_at_every_point() -> None:
    for token in (0, CHUNK - 1, CHUNK, 3 * CHUNK + 4):
        probabilities = torch.zeros(3, 3 * CHUNK + 5)
        probabilities[:, token] = 1
        assert draw(probabilities, torch.tensor([0.0, 0.3, 1 - 2.0**-52], dtype=torch.float64)).tolist() == [token] * 3
