"""What is known to read no values, and what is not."""

import torch
from torch import Tensor

from echelon.nn.autograd.attributes import FUNCTIONS_WITHOUT_VALUES


def test_shape_type_gradient_and_hooks_read_no_values() -> None:
    names = "shape dtype device grad requires_grad grad_fn is_leaf layout _version"
    assert {getattr(Tensor, name).__get__ for name in names.split()} <= FUNCTIONS_WITHOUT_VALUES
    assert {Tensor.size, Tensor.dim, Tensor.register_hook, torch.empty_like} <= FUNCTIONS_WITHOUT_VALUES


def test_values_and_what_is_computed_of_them_do() -> None:
    assert not {getattr(Tensor, name).__get__ for name in ("data", "T", "real")} & FUNCTIONS_WITHOUT_VALUES
    assert not {Tensor.add, Tensor.item, Tensor.float, Tensor.view, torch.cat} & FUNCTIONS_WITHOUT_VALUES
