"""What autograd saves for the backward pass: who only looks on, and who takes note to compute it again.

A layer may be computed in another way than the time before (all matrices of one input at once). That is
right unless somebody takes note of what autograd saves in order to compute it again, as a checkpoint does:
the second time must save the same. The memory meter only counts, through `observe`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_observers: list[Callable[[Tensor], Any]] = []


@contextmanager
def observe(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """As torch's saved_tensors_hooks, for hooks that give back the very tensors that they were given."""
    _observers.append(pack)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _observers.remove(pack)


def is_recorded() -> bool:
    """Whether somebody else takes note of what autograd saves here."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not any(hooks[0] is observer for observer in _observers)
