"""Where the weights of a model come from when it starts without memory: the interface."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from echelon.ownership import Slice


class WeightSource(Protocol):
    """Gives parts of tensors by their names in the model; does nothing before it is asked for them."""

    def errors(self) -> list[str]:
        """Why some tensors of the model have no values here; asked before memory is taken."""

    def read(self, name: str, boxes: Sequence[Slice]) -> list[Tensor]:
        """The boxes of one tensor, in memory of their own or of one whole tensor."""
