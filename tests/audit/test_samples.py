"""Outputs of samples together and in parts: which differ, and by more than rounding."""

import pytest
import torch
from torch import Tensor

from echelon.audit.samples import Part, largest_difference, rounding, sample_dims, select


def parts_of(output: Tensor, half: int) -> list[Part]:
    return [Part(0, half, output[:half]), Part(half, len(output), output[half:])]


def test_the_dim_of_samples_is_the_one_in_which_parts_are_smaller() -> None:
    whole = (torch.empty(8, 4, 3), torch.empty(4, 3), torch.empty(12, 2), torch.empty(()), torch.empty(5))
    part = (torch.empty(8, 2, 3), torch.empty(2, 3), torch.empty(6, 2), torch.empty(()), torch.empty(5))
    assert sample_dims(whole, part, samples=4, count=2) == [1, 0, 0, None, None]


def test_samples_are_selected_along_their_dim() -> None:
    rows = torch.arange(12.0).view(6, 2)  # two rows for each of three samples
    assert torch.equal(select(rows, [0], 1, 3, samples=3), rows[2:])
    assert torch.equal(select({"a": rows.T}, [1], 0, 1, samples=3)["a"], rows.T[:, :2])


def test_equal_outputs_do_not_differ_also_where_they_are_no_numbers() -> None:
    output = torch.randn(4, 3)
    output[1, 1], output[2, 0] = float("nan"), -float("inf")
    assert largest_difference(output, parts_of(output, 2), [0], 4) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_no_difference_and_more_is(dtype: torch.dtype) -> None:
    whole = torch.ones(4, 3, dtype=dtype)
    near, far = whole + rounding(dtype) / 4, whole.clone()
    far[3] += 8 * rounding(dtype)
    assert largest_difference(whole, parts_of(near, 2), [0], 4) is None
    difference = largest_difference(whole, parts_of(far, 2), [0], 4)
    assert difference is not None
    assert difference.sample == 3
    assert difference.one == 1


def test_a_small_sample_is_not_hidden_by_a_large_one() -> None:
    whole = torch.tensor([[1e6], [1.0]])
    other = torch.tensor([[1e6], [1.5]])
    difference = largest_difference(whole, [Part(0, 2, other)], [0], 2)
    assert difference is not None
    assert difference.sample == 1
