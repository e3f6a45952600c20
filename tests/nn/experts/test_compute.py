"""Experts over sorted rows give what each expert gives alone, with gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.nn.experts import Experts
from echelon.nn.experts.compute import (
    Activation,
    activate,
    activation_gradients,
    grouped_experts,
    routed_experts,
)

WIDTH, HIDDEN, EXPERTS = 6, 5, 4

# Of 5 tokens, 2 slots each; 4 is none.
ROUTINGS = {
    "spread": [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]],
    "empty experts": [[1, 3], [3, 1], [1, 3], [1, 3], [3, 1]],
    "one expert": [[2, 4], [2, 4], [2, 4], [2, 4], [2, 4]],
    "dropped": [[4, 1], [4, 4], [0, 4], [3, 1], [1, 4]],
    "all dropped": [[4, 4]] * 5,
    "one token": [[3, 0]],
    "twice the same": [[1, 1], [2, 2]],
}


def activated(rows: Tensor, activation: Activation) -> Tensor:
    if activation == "gelu":
        return F.gelu(rows)
    gate, up = rows.chunk(2, -1)
    return (F.silu(gate) if activation == "swiglu" else activation(gate)) * up  # type: ignore[operator]


def by_loop(
    x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """One token and one slot at a time."""
    rows = []
    for token in range(len(x)):
        total = x[token] * 0
        for slot, expert in enumerate(indices[token].tolist()):
            if expert < len(first):
                hidden = activated(first[expert] @ x[token], activation)
                total = total + weights[token, slot] * (down[expert] @ hidden)
        rows.append(total)
    return torch.stack(rows)


def draw(
    routing: Sequence[Sequence[int]], activation: Activation, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(3)
    indices = torch.tensor(routing)
    inner = HIDDEN if activation == "gelu" else 2 * HIDDEN
    shapes = [(len(indices), WIDTH), indices.shape, (EXPERTS, inner, WIDTH), (EXPERTS, WIDTH, HIDDEN)]
    x, weights, first, down = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    weights = weights.detach().masked_fill(indices == EXPERTS, 0).requires_grad_()
    return [x, indices, weights, first, down]


def with_gradients(compute: Callable[..., Tensor], arguments: list[Any]) -> list[Tensor]:
    output = compute(*arguments)
    leaves = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
    torch.manual_seed(5)
    is_loop = compute.__name__ in ("by_loop", "looped")  # which leaves out what is not used
    return [output, *torch.autograd.grad(output, leaves, torch.randn_like(output), materialize_grads=is_loop)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow_cases(
    "all dropped-tanh",
    "dropped-tanh",
    "empty experts-tanh",
    "one expert-tanh",
    "one token-tanh",
    "spread-tanh",
    "twice the same-tanh",
)
@pytest.mark.parametrize("activation", ["swiglu", "gelu", torch.tanh])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routed_experts_are_those_of_a_loop(routing: str, activation: Activation) -> None:
    arguments = [*draw(ROUTINGS[routing], activation), activation]
    found, expected = with_gradients(routed_experts, arguments), with_gradients(by_loop, arguments)
    weights_of_dropped = arguments[1] == EXPERTS
    assert not found[2][weights_of_dropped].any()
    assert_same(found, expected)


def test_no_tokens_have_gradients_of_zero() -> None:
    experts = Experts(EXPERTS, WIDTH, HIDDEN).double()
    x = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    output = experts(x, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.float64))
    output.sum().backward()
    assert output.shape == (0, WIDTH)
    assert x.grad is not None
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("counts", [[2, 0, 3, 1], [0, 0, 0, 8], [0, 0, 0, 0], [1, 2, 3, 2]])
def test_sorted_rows_are_computed_by_their_experts(counts: list[int], weighted: bool) -> None:
    """8 rows; those that belong to no expert give 0, and have a gradient of 0."""
    _, _, _, first, down = draw(ROUTINGS["spread"], "swiglu")
    rows = torch.randn(8, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(8, dtype=torch.float64, requires_grad=True) if weighted else None
    experts = [[expert] for expert, count in enumerate(counts) for _ in range(count)]
    indices = torch.tensor([*experts, *[[EXPERTS]] * (8 - len(experts))])

    def looped(rows: Tensor, weights: Tensor | None) -> Tensor:
        ones = torch.ones(8, dtype=torch.float64) if weights is None else weights
        return by_loop(rows, indices, ones[:, None], first, down, "swiglu")

    def grouped(rows: Tensor, weights: Tensor | None) -> Tensor:
        return grouped_experts(rows, torch.tensor(counts), first, down, "swiglu", weights)

    assert_same(with_gradients(grouped, [rows, weights]), with_gradients(looped, [rows, weights]))


def test_gradients_by_finite_differences() -> None:
    arguments = [*draw(ROUTINGS["dropped"], "swiglu"), "swiglu"]
    assert torch.autograd.gradcheck(routed_experts, arguments, fast_mode=True)


@pytest.mark.parametrize("function", ["swiglu", "gelu", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_activations_have_the_gradients_of_autograd(function: Any, weighted: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, dtype=torch.float64, requires_grad=True) if weighted else None
    if function == "swiglu":
        hidden = nn.functional.silu(rows[:, :3]) * rows[:, 3:]
    else:
        hidden = nn.functional.gelu(rows) if function == "gelu" else rows * 1
    hidden = hidden if weights is None else hidden * weights[:, None]
    gradient = torch.randn_like(hidden)
    leaves = [rows] if weights is None else [rows, weights]
    expected = torch.autograd.grad(hidden, leaves, gradient)
    plain = [None if each is None else each.detach() for each in (rows, weights)]
    before = rows.detach().clone()
    assert torch.allclose(activate(plain[0], plain[1], function), hidden, atol=1e-14)  # type: ignore[arg-type]
    for with_hidden in (False, True):
        found = activation_gradients(gradient, plain[0], plain[1], function, with_hidden=with_hidden)  # type: ignore[arg-type]
        assert torch.allclose(found.rows, expected[0], atol=1e-14)
        assert (found.weights is None) is not weighted
        if found.weights is not None:
            assert torch.allclose(found.weights, expected[1], atol=1e-14)
        assert (found.hidden is None) is not with_hidden
        if found.hidden is not None:
            assert torch.allclose(found.hidden, hidden, atol=1e-14)
    assert torch.equal(rows, before), "the rows are needed again"
