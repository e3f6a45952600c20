"""Ownership: which slices of which named global tensors a rank holds.

Every strategy lists what its rank owns, weights and optimizer state alike. Whole state dicts, checkpoints,
gradient norms and memory by category are written over that list, once, and know no strategy.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

VALUE = "value"  # the `part` that is the weight itself; any other is a key of the optimizer's state


class Slice(NamedTuple):
    """A box of one global tensor: where it lies, and along which axes other ranks hold the same box."""

    name: str
    part: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    replicated: tuple[str, ...]

    @property
    def whole(self) -> bool:
        return self.sizes == self.shape


class Owned(NamedTuple):
    """A slice, and the memory on this rank that holds it."""

    slice: Slice
    tensor: Tensor


def own_whole(
    named: Iterable[tuple[str, Tensor]], replicated: tuple[str, ...], part: str = VALUE
) -> list[Owned]:
    """Tensors that this rank holds whole, and every rank along `replicated` too."""
    return [
        Owned(
            Slice(name, part, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape), replicated),
            tensor,
        )
        for name, tensor in named
    ]


def all_names(module: nn.Module) -> dict[str, str]:
    """Every name a parameter has in the state dict → the first, where tied weights have several."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
