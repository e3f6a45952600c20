"""Logits, choices, capacities and losses that all gates share."""

import math

import pytest
import torch

from echelon.nn.experts import (
    SoftmaxGate,
)
from echelon.nn.experts.routing import (
    _Product,
    capacity_of,
    cv_squared,
    largest,
    over_capacity,
    router_logits,
    switch_balance,
    z_row,
)
from tests.nn.experts import reference
from tests.nn.experts.formulas import (
    EXPERTS,
    POSITIONS,
    SAMPLES,
    WIDTH,
    check_row,
    check_slots,
    count,
    inputs,
    logits_of,
    prepare,
    route,
)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_logits_are_in_float32_at_least(dtype: torch.dtype, expected: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 8).to(dtype), torch.randn(4, 8).to(dtype)
    logits = router_logits(x, weight)
    assert logits.dtype == expected
    torch.testing.assert_close(logits, x.to(expected) @ weight.to(expected).T)


def test_autocast_does_not_round_them() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(x, weight)
    torch.testing.assert_close(logits, x @ weight.T)


def test_the_product_of_16_bits_has_the_gradients_of_one_in_float32() -> None:
    """Rounded to 16 bits: what runs on a CUDA device, here with torch's own product."""
    torch.manual_seed(0)
    x = torch.randn(30, 8).bfloat16().requires_grad_()
    weight = torch.randn(4, 8).bfloat16().requires_grad_()
    gradient = torch.randn(30, 4)
    logits = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(logits, expected)
    found = torch.autograd.grad(logits, [x, weight], gradient)
    for one, other in zip(found, torch.autograd.grad(expected, [x, weight], gradient), strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one - other).float().norm() / other.float().norm()) < 1e-2


def test_the_example_of_the_docstring() -> None:
    a, b, c = 0, 1, 2
    indices = torch.tensor([[[a, b], [a, b], [a, c], [b, c]]])
    over = over_capacity(indices, 2)
    assert over.tolist() == [[[False, False], [False, True], [True, False], [False, False]]]


def test_samples_have_capacities_of_their_own() -> None:
    indices = torch.zeros(3, 4, 1, dtype=torch.int64)
    assert over_capacity(indices, 3).flatten(1).tolist() == [[False, False, False, True]] * 3


def test_capacities_are_rounded_up() -> None:
    assert capacity_of(1.0, 8, 1, 4) == 2
    assert capacity_of(1.25, 8, 1, 4) == 3
    assert capacity_of(1.0, 8, 2, 4) == 4
    assert capacity_of(0.01, 8, 1, 4) == 1


def test_balancing_losses() -> None:
    assert cv_squared(torch.tensor([3.0, 3.0, 3.0])) == 0
    assert cv_squared(torch.tensor([1.0, 3.0])).item() == pytest.approx(1 / 4)  # Var 1, Mean 2
    assert cv_squared(torch.zeros(4)) == 0
    uniform = torch.full((4,), 2.0)
    assert switch_balance(uniform, torch.full((4,), 2.0), torch.tensor(8.0)).item() == pytest.approx(1)
    one = torch.tensor([8.0, 0.0, 0.0, 0.0])
    assert switch_balance(one, one, torch.tensor(8.0)).item() == pytest.approx(4)
    row = z_row(torch.zeros(2, 3, 4), 0.5)
    assert row.shape == (2, 3, 4)
    assert row.sum(-1)[0, 0].item() == pytest.approx(math.log(4) ** 2)
    unweighted = z_row(torch.ones(2, 3, 4), 0.0)
    assert (unweighted.shape, unweighted.any().item()) == ((1, 1, 4), False)


def test_capacities() -> None:
    assert (capacity_of(1.0, 8, 2, 4), capacity_of(1.25, 8, 2, 4), capacity_of(1.0, 7, 2, 4)) == (4, 5, 4)
    first = torch.tensor([[[0, 1], [0, 1], [0, 2], [1, 2]]])
    assert over_capacity(first, 2).tolist() == [
        [[False, False], [False, True], [True, False], [False, False]]
    ]
    assert not over_capacity(first, 3).any()
    assert over_capacity(first, 0).all()


def test_of_equal_scores_the_first_is_chosen() -> None:
    assert largest(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3).tolist() == [1, 2, 3]
    assert largest(torch.zeros(2, 4), 2).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("factor", [0.3, 0.75])
@pytest.mark.parametrize("top_k", [1, 2])
def test_capacity(top_k: int, factor: float) -> None:
    gate = prepare(SoftmaxGate(WIDTH, EXPERTS, top_k, normalize=top_k > 1, capacity=factor))
    x = inputs()
    routing, statistics = route(gate, x)
    logits = logits_of(gate.weight, x)
    whole = [reference.softmax_top_k(each, top_k, normalize=top_k > 1) for each in logits]
    capacity = math.ceil(factor * POSITIONS * top_k / EXPERTS)
    expected = [
        slots
        for sample in range(SAMPLES)
        for slots in reference.drop_over_capacity(
            whole[sample * POSITIONS : (sample + 1) * POSITIONS], capacity, EXPERTS
        )
    ]
    assert expected != whole
    check_slots(routing, expected)
    check_row(gate, statistics, "tokens", count(whole))
    dropped = [all_ - kept for all_, kept in zip(count(whole), count(expected), strict=True)]
    check_row(gate, statistics, "dropped", dropped)
