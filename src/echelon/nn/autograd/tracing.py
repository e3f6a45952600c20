"""Functions that torch.compile must not trace: messages between ranks, and numbers that change every step.

A compiled layer is traced once and replayed. A message would be traced as one of a single rank, and the
number of a step as a constant. An `untraced` function splits the trace: it runs each time.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator. Unlike torch.compiler.disable, it imports the compiler at the first call, not before."""
    return _disable_dynamo(function)
