"""Kernels of expert layers, run in numpy: rows go to experts and back, and are activated on the way."""

import pytest
import torch
from torch.nn.functional import silu

import echelon.nn.experts
from echelon.nn.experts.rows import sort_slots
from tests.nn.dropout.triton_stand_in import kernel_on_cpu


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (7, 20), (40, 2100)])
def test_rows_go_to_experts_and_back(tokens: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, indices = torch.randn(tokens, width, generator=generator), torch.randint(5, (tokens, 2))
    slots = sort_slots(indices, 5)
    with kernel_on_cpu(echelon.nn.experts, "kernels") as kernels:
        rows = kernels.gather_rows(x, slots.inverse, 2 * tokens)
        assert torch.equal(kernels.gather_rows(x, slots.inverse, tokens), rows[:tokens])
        total = kernels.sum_slots(rows, slots.inverse)
    assert torch.equal(rows, x[slots.order // 2])
    torch.testing.assert_close(total, 2 * x)


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("function", ["none", "swiglu"])
def test_rows_are_activated_and_weighted(function: str, with_weights: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(19, 260, generator=generator)
    weights = torch.rand(19, generator=generator) if with_weights else None
    with kernel_on_cpu(echelon.nn.experts, "kernels") as kernels:
        hidden = kernels.activate(rows, weights, function)
    expected = rows if function == "none" else silu(rows[:, :130]) * rows[:, 130:]
    torch.testing.assert_close(hidden, expected if weights is None else expected * weights[:, None])
