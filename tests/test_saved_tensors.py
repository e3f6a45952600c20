"""Whether somebody takes note of what autograd saves."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from echelon.saved_tensors import is_recorded, observe


def test_observers_do_not_count() -> None:
    assert not is_recorded()
    with observe(lambda tensor: tensor, lambda tensor: tensor):
        assert not is_recorded()
    assert not is_recorded()


def test_other_hooks_do() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert is_recorded()
        with observe(lambda tensor: tensor, lambda tensor: tensor):
            assert not is_recorded()  # torch asks the innermost hooks alone
        assert is_recorded()


def test_a_checkpoint_does() -> None:
    found: list[bool] = []

    def compute(x: Tensor) -> Tensor:
        found.append(is_recorded())
        return x * x

    checkpoint(compute, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert found == [True, True]


def test_an_error_inside_ends_the_observation() -> None:
    try:
        with observe(lambda tensor: tensor, lambda tensor: tensor):
            raise RuntimeError
    except RuntimeError:
        pass
    assert not is_recorded()
