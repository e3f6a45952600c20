"""How often a backward pass comes by at each leaf."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from echelon.nn.autograd.leaves import leaf_uses, used_once


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
