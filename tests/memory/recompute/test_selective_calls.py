"""Calls that run again: their arguments, as they were when the call was made."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.memory.recompute.selective import selective
from tests.memory.recompute.test_selective import Layer, share_of


def test_an_argument_that_is_changed_before_its_output_is_saved() -> None:
    def middle(h: Tensor) -> Tensor:
        doubled = h.detach() * 2
        scaled = doubled * 3
        doubled.zero_()
        return h * scaled

    share_of(middle)


def test_an_argument_that_others_keep_in_another_view() -> None:
    def middle(h: Tensor) -> Tensor:
        table = torch.randn(64, 64)
        more = table + 1
        return F.gelu(h @ table.T) * (h @ more)

    share_of(lambda h: middle(torch.manual_seed(3) and h))


def test_hooks_around_may_give_back_tensors_of_other_strides() -> None:
    """Rows that are kept were taken for the memory that they lie in, of which others show other rows."""

    class Halves(Layer):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(torch.cat([torch.cumprod(h[::2], -1), F.gelu(h[:16])]))

    torch.manual_seed(0)
    layer, x, gradients = Halves(F.gelu), torch.randn(32, 16, dtype=torch.float64), []
    layer.double()
    for around in (nullcontext, selective):
        layer.zero_grad()
        compact = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
        with compact, around():
            loss = layer(x).square().sum()
        loss.backward()
        gradients.append([p.grad for p in layer.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


def test_a_kept_argument_that_is_changed_afterwards_is_an_error() -> None:
    layer, x = Layer(F.gelu), torch.randn(32, 16)
    with selective():
        h = layer.first(x)
        loss = layer.last(F.gelu(h)).sum()
    h.data.mul_(1)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after the forward pass had saved it"):
        loss.backward()


def test_a_graph_that_is_walked_twice() -> None:
    assert share_of(lambda h: F.silu(h) * h.sigmoid(), backwards=2) < 0.7


def test_arguments_by_name_and_sparse_ones() -> None:
    share_of(lambda h: torch.add(input=h, other=1) * F.linear(input=h, weight=torch.eye(64)))
    share_of(lambda h: F.gelu(h) + torch.addmm(input=h, mat1=h, mat2=torch.eye(64)))
    share_of(lambda h: torch.add(h, torch.eye(32, 64).to_sparse()) * h)
    share_of(lambda h: F.gelu(h).type(h.type()))


def test_weights_that_are_freed_are_copied_where_small() -> None:
    """As with zero=3: a norm's weights may be gone when the layer after it goes back."""
    torch.manual_seed(0)
    norm, last = nn.LayerNorm(16), nn.Linear(16, 16)
    x = torch.randn(64, 16)
    with selective(frees_weights=True):
        loss = last(norm(x)).square().sum()
    values = [parameter.detach().clone() for parameter in norm.parameters()]
    for parameter in norm.parameters():
        parameter.data.fill_(float("nan"))
    (gradient,) = torch.autograd.grad(loss, last.weight)
    for parameter, value in zip(norm.parameters(), values, strict=True):
        parameter.data.copy_(value)
    (expected,) = torch.autograd.grad(last(norm(x)).square().sum(), last.weight)
    assert torch.equal(gradient, expected)
