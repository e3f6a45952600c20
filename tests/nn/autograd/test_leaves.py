"""How often a backward pass comes by at each leaf."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from echelon.nn.autograd.leaves import is_own_hook, late_hooks, leaf_uses, product, twin, used_once


def leaves(number: int) -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(number)]


def test_each_edge_to_a_leaf_is_a_use() -> None:
    one, two, three, unused = leaves(4)
    hidden = one * two
    outputs = [hidden + two, (hidden * three).sum()]  # the way to `one` and `two` is walked once
    assert leaf_uses(each.grad_fn for each in outputs) == {one: 1, two: 2, three: 1}
    assert used_once([get_gradient_edge(each) for each in outputs]) == {one, three}
    assert unused not in leaf_uses([outputs[0].grad_fn, None])


def test_an_output_that_is_a_leaf_is_a_use_too() -> None:
    (leaf,) = leaves(1)
    outputs = [get_gradient_edge(leaf), get_gradient_edge(leaf * 2)]
    assert used_once(outputs[:1]) == {leaf}
    assert used_once(outputs) == set()


def test_what_a_reentrant_checkpoint_uses_is_not_used_once() -> None:
    """Its backward pass has backward passes of its own, each of which adds to the gradient."""
    layer, x = nn.Linear(2, 2), leaves(1)[0]
    found = [
        used_once([get_gradient_edge(checkpoint(layer, x, use_reentrant=reentrant).sum())])
        for reentrant in (False, True)
    ]
    assert found == [{layer.weight, layer.bias, x}, {x}]


def test_a_twin_has_the_hooks_of_the_weight_and_a_gradient_of_its_own() -> None:
    weight, calls = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), []
    weight.register_hook(lambda gradient: calls.append("hook") or gradient * 3)  # type: ignore[func-returns-value]
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("late"))
    wide = twin(weight, weight.detach().float())
    (wide * 2).sum().backward()
    assert calls == ["hook", "late"]
    assert weight.grad is None
    assert wide.grad is not None
    assert wide.grad.tolist() == [6.0, 6.0]
    assert not twin(nn.Parameter(torch.ones(1), requires_grad=False), torch.zeros(1)).requires_grad


def test_hooks_of_an_engine_are_none_of_the_user_s() -> None:
    def own(*_: object) -> None: ...

    def other(*_: object) -> None: ...

    own.__module__ = "echelon.parallel.data.reducer"
    assert is_own_hook(own)
    assert is_own_hook(partial(partial(own, 1), 2))
    assert not is_own_hook(other)
    assert not is_own_hook(partial(other, 1))
    assert not is_own_hook(object.__new__(type("Callable", (), {"__module__": None})))
    parameter = nn.Parameter(torch.ones(1))
    assert late_hooks(parameter) == []
    parameter.register_post_accumulate_grad_hook(own)
    parameter.register_post_accumulate_grad_hook(other)
    assert late_hooks(parameter) == [other]


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 1, 3, 4), (0, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_linear(shape: tuple[int, ...], bias: bool) -> None:
    x, matrix = torch.randn(shape), torch.randn(5, 4)
    added = torch.randn(5) if bias else None
    torch.testing.assert_close(product(x, matrix, added), F.linear(x, matrix, added))


class Doubled(torch.autograd.Function):
    """An autograd function that returns several products, and computes its gradients itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(matrix)
        return product(x, matrix, None), product(x, matrix, None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (matrix,) = ctx.saved_tensors
        return sum(gradient @ matrix for gradient in gradients), None


def test_the_result_of_an_autograd_function_may_be_changed_in_place() -> None:
    """F.linear of three dims returns a view, which autograd does not let others change."""
    x, matrix = torch.randn(2, 3, 4, requires_grad=True), torch.eye(4)
    first, second = Doubled.apply(x, matrix)  # type: ignore[no-untyped-call]
    (first.mul_(3) + second).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 4))  # type: ignore[arg-type]
