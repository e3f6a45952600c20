"""A product with a matrix, as F.linear makes it, that is never a view."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.nn.autograd.in_place import product


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
