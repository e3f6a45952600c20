"""A microbatch, as the stages of a rank may need it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple


class Microbatch(NamedTuple):
    """One microbatch as a stage may need it.

    `look` says what its inputs look like, the same on all ranks; `scope` opens its place in the training.
    """

    inputs: Any
    targets: Any
    weight: int
    look: str
    scope: Callable[[], AbstractContextManager[None]] = nullcontext
