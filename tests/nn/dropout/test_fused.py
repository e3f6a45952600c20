"""Dropout in one pass: its gradient has the same mask, and nothing is kept for it."""

import pytest
import torch
from torch import Tensor

from echelon.nn.dropout import fused
from echelon.nn.dropout.fused import drop
from echelon.nn.dropout.mask import Draw, mask_of
from echelon.nn.hashing import hash_of
from tests.nn.dropout.triton_stand_in import kernel_on_cpu

DRAW = Draw(hash_of(1, 2, 3, 0), 4, 0.3)


def expected(x: Tensor) -> Tensor:
    return x * mask_of(DRAW, x.shape, "cpu") * DRAW.scale


def test_the_gradient_is_that_of_the_same_mask_and_nothing_is_kept() -> None:
    x = torch.randn(6, 50, dtype=torch.float64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = drop(x, DRAW)
    assert torch.equal(output, expected(x))
    weights = torch.randn_like(output, requires_grad=True)
    (gradient,) = torch.autograd.grad(output, x, weights, create_graph=True)
    assert torch.equal(gradient, expected(weights))
    assert torch.equal(torch.autograd.grad(gradient.sum(), weights)[0], expected(torch.ones_like(x)))
    assert saved == []


def test_inplace_is_in_place() -> None:
    x = torch.randn(4, 6)
    result = expected(x)
    assert drop(x, DRAW, inplace=True) is x
    assert torch.equal(x, result)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_kernel_sees_contiguous_memory_and_strides_stay(
    inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "has_kernel", lambda _: True)
    x = torch.randn(5, 4, 6).transpose(1, 2)
    result = expected(x)
    with kernel_on_cpu():
        output = drop(x, DRAW, inplace=inplace)
    assert output.stride() == x.stride()
    assert torch.equal(output, result)


def test_nothing_of_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "has_kernel", lambda _: True)
    assert drop(torch.empty(0, 4), DRAW).shape == (0, 4)
