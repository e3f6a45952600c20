"""Whether somebody takes note of what autograd saves."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from echelon.nn.autograd.saved_tensors import (
    KeptTensor,
    current_hooks,
    current_observer,
    is_recorded,
    observe,
    replace,
)


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


def test_hooks_that_compute_again_in_the_same_way_do_not_count() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    with replace(pack, pack):
        assert not is_recorded()
        assert current_observer() is None
        with observe(pack, pack):
            assert current_observer() == (pack, pack)
    assert current_hooks() is None


def test_a_tensor_is_kept_without_its_history_in_the_way_of_the_hooks_around() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    kept = KeptTensor(x, None)
    assert kept.take().grad_fn is None
    assert kept.take().data_ptr() == x.data_ptr()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.tolist(), torch.tensor):
        kept = KeptTensor(x, current_hooks())
    assert kept._packed == [2.0, 2.0]
    assert kept.take().tolist() == [2.0, 2.0]


def test_a_kept_tensor_that_was_changed_is_found() -> None:
    x = torch.ones(2)
    kept = KeptTensor(x, None)
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after the forward pass had saved it"):
        kept.take()
