"""What torch.compile must not look into: messages between ranks, and numbers that change with every step.

A compiled layer is recorded once and replayed. A message in it would be recorded as one of a single rank,
and a step's number as a constant. A function that is `untraced` splits the recording: it runs each time.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator. Unlike torch.compiler.disable, it does not import the compiler where nobody compiles."""
    return _disable_dynamo(function)
