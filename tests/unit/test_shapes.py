from __future__ import annotations

import jaxtyping
import pytest
import torch

from hybridflow.algorithms.masking import masked_mean


@pytest.mark.parametrize(
    ("values", "mask"),
    [
        (torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool)),
        (torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.long)),
        (torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)),
    ],
    ids=["other size", "mask of integers", "values of integers"],
)
def test_a_tensor_of_another_shape_or_dtype_than_written_is_refused_in_tests(values, mask):
    assert masked_mean(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)) == 1
    with pytest.raises(jaxtyping.TypeCheckError):
        masked_mean(values, mask)
