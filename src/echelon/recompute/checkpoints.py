"""Checkpoints: the arguments of layers that are recomputed, and how they are kept until then."""

from typing import Protocol

from torch import Tensor

from echelon.saved_tensors import Hooks, KeptTensor


class Kept(Protocol):
    """Gives back the values of a tensor."""

    def take(self) -> Tensor: ...


class Checkpoints(Protocol):
    """Keeps a tensor in some memory. `hooks`: those around the layer, which count what is kept."""

    def keep(self, tensor: Tensor, hooks: Hooks | None) -> Kept: ...


class WholeCheckpoints:
    """As they are."""

    def keep(self, tensor: Tensor, hooks: Hooks | None) -> Kept:
        return KeptTensor(tensor, hooks)
