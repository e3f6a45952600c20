"""How the replicas of a stage hold their weights and agree on gradients: the interface.

The engine calls, for each step and in this order: `start_step`; for each microbatch `start_backward`, then
the backward pass; `finish_gradients`; the optimizer over `parameters()`; `finish_step`.
"""

from abc import ABC, abstractmethod
from typing import final

from torch import nn

from echelon.ownership import Owned, own_whole


class Sync(ABC):
    """One way for replicas to stay equal. Knows nothing of other axes."""

    @abstractmethod
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What this rank's optimizer updates, by name."""

    @abstractmethod
    def start_step(self) -> None:
        """Forget old gradients. Also mends what a failed step left behind."""

    @abstractmethod
    def start_backward(self, *, last: bool) -> None:
        """A microbatch's backward pass begins; after the `last` one of the step gradients are complete."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Return when `.grad` of every parameter is the sum over all replicas, or None if none used it."""

    @abstractmethod
    def finish_step(self) -> None:
        """The optimizer has updated `parameters()`: bring the weights everywhere they are used."""

    @abstractmethod
    def owned(self) -> list[Owned]:
        """The weights that this rank holds."""


@final
class Alone(Sync):
    """One replica: there is nobody to agree with."""

    def __init__(self, module: nn.Module) -> None:
        self._named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._module = module

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self._named

    def start_step(self) -> None:
        for _, parameter in self._named:
            parameter.grad = None

    def start_backward(self, *, last: bool) -> None:
        pass

    def finish_gradients(self) -> None:
        pass

    def finish_step(self) -> None:
        pass

    def owned(self) -> list[Owned]:
        return own_whole(self._module.named_parameters(), replicated=())
