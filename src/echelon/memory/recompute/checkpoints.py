"""Checkpoints: the arguments of layers that are recomputed, and how they are kept until then."""

from typing import NamedTuple, Protocol

from torch import Tensor

from echelon.nn.autograd.saved_tensors import Hooks, KeptTensor


class ArgumentName(NamedTuple):
    """Which argument of which layer."""

    layer: str
    number: int


class Kept(Protocol):
    """Gives back the values of a tensor."""

    def take(self) -> Tensor: ...


class Checkpoints(Protocol):
    """Keeps a tensor in some memory. `hooks`: those around the layer, which count what is kept."""

    def keep(self, tensor: Tensor, hooks: Hooks | None, argument: ArgumentName) -> Kept: ...

    def keeps_memory(self, tensor: Tensor, argument: ArgumentName) -> bool:
        """Whether `keep` will hold the very memory of the tensor: then autograd may save it too."""

    def kept_bytes(self, tensor: Tensor, argument: ArgumentName) -> int:
        """What `keep` will hold."""


class WholeCheckpoints:
    """As they are."""

    def keep(self, tensor: Tensor, hooks: Hooks | None, argument: ArgumentName) -> Kept:  # noqa: ARG002
        return KeptTensor(tensor, hooks)

    def keeps_memory(self, tensor: Tensor, argument: ArgumentName) -> bool:  # noqa: ARG002
        return True

    def kept_bytes(self, tensor: Tensor, argument: ArgumentName) -> int:  # noqa: ARG002
        return tensor.untyped_storage().nbytes()
