"""Slots are sorted by expert, in the order of tokens; dropped ones lie behind."""

import pytest
import torch
from torch import Tensor

from echelon.nn.experts.sorting import ends_of, gather_rows, sort_slots, sort_weights, sum_slots


def test_the_picture_of_the_module() -> None:
    slots = sort_slots(torch.tensor([[2, 0], [0, 1]]), 3)
    assert slots.order.tolist() == [1, 2, 3, 0]
    assert slots.ends.tolist() == [2, 3, 4]
    assert slots.inverse.tolist() == [[3, 0], [1, 2]]
    assert slots.ends.dtype == torch.int32


def test_dropped_slots_lie_behind_all_experts() -> None:
    slots = sort_slots(torch.tensor([[3, 1], [3, 3], [1, 0]]), 3)
    assert slots.order.tolist() == [5, 1, 4, 0, 2, 3]
    assert slots.ends.tolist() == [1, 3, 3]


def test_no_slots() -> None:
    slots = sort_slots(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert slots.ends.tolist() == [0, 0, 0]
    assert gather_rows(torch.zeros(0, 4), slots).shape == (0, 4)
    assert sum_slots(torch.zeros(0, 4), slots).shape == (0, 4)


def test_ends_of_counts() -> None:
    ends = ends_of(torch.tensor([2, 0, 3]))
    assert ends.tolist() == [2, 2, 5]
    assert ends.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_go_to_experts_and_back(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(5, (7, 3), generator=generator)
    x = torch.randn(7, 4, generator=generator).to(dtype)
    slots = sort_slots(indices, 5)
    rows = gather_rows(x, slots)
    experts = indices.flatten()[slots.order]
    assert torch.equal(experts, experts.sort().values)
    assert torch.equal(rows, x[slots.order // 3])
    assert torch.equal(sum_slots(rows, slots), (3 * x.to(torch.float64)).to(dtype))


def test_a_sum_of_slots_is_rounded_once() -> None:
    """1 + 2⁻⁸ + 2⁻⁸ in bfloat16 is 1 if each sum is rounded."""
    slots = sort_slots(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)
    assert sum_slots(rows, slots).item() == 1 + 2**-7


def test_weights_follow_their_slots_and_gradients_come_back() -> None:
    indices = torch.tensor([[2, 0], [0, 1], [3, 2]])
    weights = torch.arange(6.0).view(3, 2).requires_grad_()
    slots = sort_slots(indices, 3)
    ordered = sort_weights(weights, slots)
    assert ordered.tolist() == [1.0, 2.0, 3.0, 0.0, 5.0, 4.0]
    gradient: Tensor = torch.autograd.grad(ordered, weights, torch.arange(6.0) * 10)[0]
    assert gradient.tolist() == [[30.0, 0.0], [10.0, 20.0], [50.0, 40.0]]
