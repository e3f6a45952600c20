"""A function that is untraced runs each time, also in a function that torch compiles."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from echelon.nn.tracing import FUNCTIONS_WITHOUT_VALUES, untraced

calls = 0


@untraced
def count() -> int:
    """A number that changes with every call."""
    global calls
    calls += 1
    return calls


def add_count(x: Tensor) -> Tensor:
    return x * 2 + count()


def test_a_number_is_not_traced_as_a_constant() -> None:
    compiled = torch.compile(add_count, backend="eager")
    results = [compiled(torch.ones(1)).item() for _ in range(3)]
    assert results == [3, 4, 5]


@pytest.mark.slow
def test_a_decorated_function_imports_the_compiler_only_when_it_is_called() -> None:
    code = (
        "import sys, echelon.nn.tracing as t; "
        "three = t.untraced(lambda: 3); "
        "assert 'torch._dynamo' not in sys.modules; "
        "assert three() == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_shape_type_gradient_and_hooks_read_no_values() -> None:
    names = "shape dtype device grad requires_grad grad_fn is_leaf layout _version"
    assert {getattr(Tensor, name).__get__ for name in names.split()} <= FUNCTIONS_WITHOUT_VALUES
    assert {Tensor.size, Tensor.dim, Tensor.register_hook, torch.empty_like} <= FUNCTIONS_WITHOUT_VALUES


def test_values_and_what_is_computed_of_them_do() -> None:
    assert not {getattr(Tensor, name).__get__ for name in ("data", "T", "real")} & FUNCTIONS_WITHOUT_VALUES
    assert not {Tensor.add, Tensor.item, Tensor.float, Tensor.view, torch.cat} & FUNCTIONS_WITHOUT_VALUES
