"""One update of what a rank holds: in its own type, or through float32 masters.

Below float32 a weight is too coarse to add small updates to. There the optimizer works on float32 copies, the
masters; after each update the weights are their rounding. Gradients become float32 for a few at a time, so
that they never need the memory of a second whole gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.optim.local import Make, make_local, works_by_element
from echelon.ownership import Held

_BYTES_AT_ONCE = 32 * 2**20  # of float32 gradients


class Stepper(ABC):
    """Applies the optimizer to what is held, with gradients scaled by a factor."""

    optimizer: torch.optim.Optimizer

    @abstractmethod
    def step(self, factor: float) -> None:
        """Update everything that has a gradient."""

    @abstractmethod
    def updated(self, held: Held) -> nn.Parameter:
        """The tensor under which the optimizer keeps its state of `held`."""

    def masters(self) -> list[Tensor]:
        """Memory beside the weights that belongs to the optimizer."""
        return []


@final
class Direct(Stepper):
    """The optimizer works on the weights themselves."""

    def __init__(
        self, make: Make, parameters: Sequence[nn.Parameter], held: list[Held], *, in_parts: bool
    ) -> None:
        self._held = held
        self.optimizer = make_local(make, parameters, _by_parameter(held, held), in_parts=in_parts)

    def step(self, factor: float) -> None:
        gradients = [held.tensor.grad for held in self._held if held.tensor.grad is not None]
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.optimizer.step()

    def updated(self, held: Held) -> nn.Parameter:
        return held.tensor


@final
class Masters(Stepper):
    """The optimizer works on float32 copies of the weights."""

    def __init__(
        self, make: Make, parameters: Sequence[nn.Parameter], held: list[Held], *, in_parts: bool
    ) -> None:
        self._held = held
        self._masters = {h.tensor: nn.Parameter(h.tensor.detach().float()) for h in held}
        copies = [h._replace(tensor=self._masters[h.tensor]) for h in held]
        self.optimizer = make_local(make, parameters, _by_parameter(held, copies), in_parts=in_parts)

    def step(self, factor: float) -> None:
        for some in self._portions():
            for held in some:
                gradient = held.tensor.grad
                master = self._masters[held.tensor]
                master.grad = None if gradient is None else gradient.float().mul_(factor)
            self.optimizer.step()  # leaves alone what has no gradient: all but this portion
            for held in some:
                master = self._masters[held.tensor]
                held.tensor.detach().copy_(master.detach())
                master.grad = None

    def updated(self, held: Held) -> nn.Parameter:
        return self._masters[held.tensor]

    def masters(self) -> list[Tensor]:
        return list(self._masters.values())

    def _portions(self) -> Iterator[list[Held]]:
        some: list[Held] = []
        size = 0
        for held in self._held:
            some.append(held)
            size += 4 * held.tensor.numel()
            if size >= _BYTES_AT_ONCE and self._divisible:
                yield some
                some, size = [], 0
        if some:
            yield some

    @property
    def _divisible(self) -> bool:
        """Whether one step may be several calls: for optimizers that we know, with no one listening in."""
        its = self.optimizer
        heard = its._optimizer_step_pre_hooks or its._optimizer_step_post_hooks
        return works_by_element(its) and not heard


def _by_parameter(held: list[Held], tensors: list[Held]) -> dict[nn.Parameter, list[nn.Parameter]]:
    result: dict[nn.Parameter, list[nn.Parameter]] = {}
    for its, replacement in zip(held, tensors, strict=True):
        result.setdefault(its.parameter, []).append(replacement.tensor)
    return result
