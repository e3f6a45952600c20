"""A function that is untraced runs each time, also in a function that torch compiles."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from echelon.nn.tracing import untraced

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
