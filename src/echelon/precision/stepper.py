"""One update of the local parameters of a rank: in their own type, or through float32 masters.

Below float32 a weight is too coarse to add small updates to. There the optimizer works on float32 copies, the
masters; after each update the weights are rounded from them. Gradients become float32 for a few at a time, so
that they never need the memory of a second whole gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.optim.local import Make, make_local, works_by_element
from echelon.ownership import MASTER, LocalParameter

_BYTES_AT_ONCE = 32 * 2**20  # of float32 gradients


class Stepper(ABC):
    """Applies the optimizer to local parameters, with gradients scaled by a factor."""

    optimizer: torch.optim.Optimizer

    @abstractmethod
    def step(self, factor: float) -> None:
        """Update everything that has a gradient."""

    @abstractmethod
    def state(self, local: LocalParameter) -> dict[str, Tensor]:
        """What belongs to a parameter beside the weight itself: the optimizer's state, and a master."""


@final
class DirectStepper(Stepper):
    """The optimizer works on the weights themselves."""

    def __init__(
        self, make: Make, parameters: Sequence[nn.Parameter], local: list[LocalParameter], *, in_parts: bool
    ) -> None:
        self._local = local
        self.optimizer = make_local(make, parameters, _by_parameter(local, local), in_parts=in_parts)

    def step(self, factor: float) -> None:
        gradients = [each.tensor.grad for each in self._local if each.tensor.grad is not None]
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.optimizer.step()

    def state(self, local: LocalParameter) -> dict[str, Tensor]:
        return _state_tensors(self.optimizer, local.tensor)


@final
class MasterStepper(Stepper):
    """The optimizer works on float32 copies of the weights."""

    def __init__(
        self, make: Make, parameters: Sequence[nn.Parameter], local: list[LocalParameter], *, in_parts: bool
    ) -> None:
        self._local = local
        self._masters = {each.tensor: nn.Parameter(each.tensor.detach().float()) for each in local}
        copies = [each._replace(tensor=self._masters[each.tensor]) for each in local]
        self.optimizer = make_local(make, parameters, _by_parameter(local, copies), in_parts=in_parts)

    def step(self, factor: float) -> None:
        for portion in self._portions():
            for each in portion:
                gradient = each.tensor.grad
                master = self._masters[each.tensor]
                master.grad = None if gradient is None else gradient.float().mul_(factor)
            self.optimizer.step()  # leaves alone what has no gradient: all but this portion
            for each in portion:
                master = self._masters[each.tensor]
                each.tensor.detach().copy_(master.detach())
                master.grad = None

    def state(self, local: LocalParameter) -> dict[str, Tensor]:
        master = self._masters[local.tensor]
        return {MASTER: master.detach(), **_state_tensors(self.optimizer, master)}

    def _portions(self) -> Iterator[list[LocalParameter]]:
        portion: list[LocalParameter] = []
        size = 0
        for each in self._local:
            portion.append(each)
            size += 4 * each.tensor.numel()
            if size >= _BYTES_AT_ONCE and self._divisible:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion

    @property
    def _divisible(self) -> bool:
        """Whether one step may be several calls: for optimizers that we know, with no one listening in."""
        optimizer = self.optimizer
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        return works_by_element(optimizer) and not hooked


def _state_tensors(optimizer: torch.optim.Optimizer, updated: nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's state of one tensor that it updates."""
    state = optimizer.state.get(updated, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _by_parameter(
    local: list[LocalParameter], updated: list[LocalParameter]
) -> dict[nn.Parameter, list[nn.Parameter]]:
    result: dict[nn.Parameter, list[nn.Parameter]] = {}
    for each, replacement in zip(local, updated, strict=True):
        result.setdefault(each.parameter, []).append(replacement.tensor)
    return result
