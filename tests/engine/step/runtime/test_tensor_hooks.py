"""Hooks on tensors and on nodes of the graph are noticed, and nothing of the noticing stays."""

import pytest
import torch
from torch import Tensor

from echelon.engine.step.runtime.interpreter import explain_second_order
from echelon.engine.step.runtime.split_backward import have_hooks, watch_hooks
from echelon.errors import UserError


def computed() -> Tensor:
    return torch.ones(2, requires_grad=True) * 2


def test_a_hook_of_what_is_computed_is_noticed() -> None:
    before = (Tensor.register_hook, Tensor.retain_grad)
    for use in (lambda: computed().register_hook(lambda g: g), lambda: computed().retain_grad()):
        with watch_hooks() as watch:
            assert not watch.is_hooked
            use()
            torch.ones(2, requires_grad=True).register_hook(lambda g: g)
        assert watch.is_hooked
    assert (Tensor.register_hook, Tensor.retain_grad) == before
    assert "retain_grad" not in vars(Tensor), "it is that of the base again"
    with watch_hooks() as watch:
        handle = torch.ones(2, requires_grad=True).register_hook(lambda g: g)
        handle.remove()
    assert not watch.is_hooked, "leaves may have hooks"


def test_hooks_still_work_while_they_are_watched() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with watch_hooks():
        middle = leaf * 2
        middle.retain_grad()
        middle.register_hook(lambda gradient: gradient * 10)
        middle.sum().backward()
    assert middle.grad is not None
    assert leaf.grad is not None
    assert (middle.grad.tolist(), leaf.grad.tolist()) == ([10, 10], [20, 20])


def test_hooks_on_nodes() -> None:
    node, other = computed().grad_fn, computed().grad_fn
    assert node is not None
    assert other is not None
    assert have_hooks([]) is have_hooks([node, other]) is False
    handle = other.register_prehook(lambda gradients: gradients)
    assert have_hooks([node, other]) is True
    handle.remove()
    assert have_hooks([node, other]) is False
    node.register_hook(lambda inputs, _: inputs)
    assert have_hooks([node]) is True
    assert have_hooks([other]) is False


def test_what_cannot_be_differentiated_twice_is_said_in_words() -> None:
    with (
        pytest.raises(UserError, match="the model or loss differentiates a gradient"),
        explain_second_order(),
    ):
        raise RuntimeError("trying to differentiate twice a function that was marked")
    with pytest.raises(RuntimeError, match="out of memory"), explain_second_order():
        raise RuntimeError("out of memory")
