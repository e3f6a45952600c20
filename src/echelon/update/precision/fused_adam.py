"""Adam and AdamW over float32 masters in one pass on a CUDA device, which also rounds the weights.

torch's own kernel updates the masters, another one rounds the weights from them, and below float32 a third
one converts the gradients. Each reads again what the one before has written. `fused_adam_kernel` does all of
it while an element is at hand: 28 bytes per parameter, and 30 with float32 gradients.

The arithmetic is that of torch's fused kernel; step counters and moments stay in the optimizer's state.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.nn.triton_support import has_triton
from echelon.update.numbers import Flag, Number
from echelon.update.precision.flat_memory import has_kernel
from echelon.update.precision.optimizer_call import on_device

if TYPE_CHECKING:
    from echelon.update.precision.fused_adam_kernel import Table

_ALIGNMENT = 16  # bytes: what the kernel reads at once


class Element(NamedTuple):
    weight: Tensor
    gradient: Tensor
    master: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor


class Part(NamedTuple):
    """Masters of one parameter group, whose weights have one type and whose gradients have one."""

    group: int
    places: list[int]  # among all that is updated
    table: "Table"
    steps: list[Tensor]


@final
class Prepared:
    """Arguments of the kernel for some masters, valid while all but gradients lies where it lay. It holds no
    gradient: those of the next step may need the memory."""

    def __init__(self, groups: Sequence[int], elements: Sequence[Element], addresses: list[int]) -> None:
        """`groups`: the parameter group of each element; `addresses`: of all but gradients."""
        from echelon.update.precision.fused_adam_kernel import Table

        self._addresses = addresses
        self._types = [element.gradient.dtype for element in elements]
        self._gradients = [element.gradient.data_ptr() for element in elements]
        kinds: dict[tuple[int, torch.dtype, torch.dtype], list[int]] = {}
        for place, (group, each) in enumerate(zip(groups, elements, strict=True)):
            kinds.setdefault((group, each.weight.dtype, each.gradient.dtype), []).append(place)
        self.parts = [
            Part(group, places, Table(of_kind), [element.step for element in of_kind])
            for (group, *_), places in kinds.items()
            for of_kind in [[elements[place] for place in places]]
        ]

    def holds(self, gradients: Sequence[Tensor], addresses: list[int]) -> bool:
        """Return whether it is valid, with gradients of these types."""
        return addresses == self._addresses and [each.dtype for each in gradients] == self._types

    def point_at(self, gradients: Sequence[Tensor]) -> None:
        """Take gradients from where they lie in this step."""
        addresses = [gradient.data_ptr() for gradient in gradients]
        for part in self.parts:
            if any(addresses[place] != self._gradients[place] for place in part.places):
                part.table.point_at([gradients[place] for place in part.places])
        self._gradients = addresses


@final
class FusedAdam:
    """Updates masters and weights for an optimizer of torch, where it can (`prepare`)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._prepared: dict[nn.Parameter, Prepared] = {}  # by the first master

    @property
    def is_usable(self) -> bool:
        """Return whether it can update masters on a device, for this optimizer."""
        return has_triton() and self._suits()

    def prepare(self, weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> Prepared | None:
        """If the kernel can update all of the masters: not their first time, which makes the state."""
        if not masters or not self._suits():
            return None
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        addresses = self._addresses(weights, masters)
        if addresses is None or len(gradients) < len(weights) or not all(map(_is_readable, gradients)):
            return None
        known = self._prepared.get(masters[0])
        if known is not None and known.holds(gradients, addresses):
            known.point_at(gradients)
            return known
        elements = self._elements(weights, gradients, masters)
        if elements is None:
            return None
        group_of = {p: n for n, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        prepared = Prepared([group_of[master] for master in masters], elements, addresses)
        self._prepared[masters[0]] = prepared
        return prepared

    def forget(self) -> None:
        self._prepared.clear()

    def _suits(self) -> bool:
        return type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
            group["fused"]
            and not any(group[key] for key in ("amsgrad", "maximize", "capturable", "differentiable"))
            and not isinstance(group["lr"], Tensor)
            for group in self._optimizer.param_groups
        )

    def _addresses(
        self, weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]
    ) -> list[int] | None:
        """Return the addresses of all that belongs to the masters, but gradients; None without state."""
        addresses = []
        for weight, master in zip(weights, masters, strict=True):
            state = self._optimizer.state.get(master)
            if not state:
                return None
            moments = (state["exp_avg"], state["exp_avg_sq"], state["step"])
            addresses += [tensor.data_ptr() for tensor in (weight, master, *moments)]
        return addresses

    def _elements(
        self, weights: Sequence[nn.Parameter], gradients: Sequence[Tensor], masters: Sequence[nn.Parameter]
    ) -> list[Element] | None:
        """All of each master, with its state and gradient; None where the kernel takes no such tensors."""
        elements = []
        for weight, gradient, master in zip(weights, gradients, masters, strict=True):
            state = self._optimizer.state[master]
            moments = (state["exp_avg"], state["exp_avg_sq"], state["step"])
            element = Element(weight.detach(), gradient.detach(), master.detach(), *moments)
            if not has_kernel(master) or not all(_lies_like(tensor, master) for tensor in element[:-1]):
                return None
            elements.append(element)
        return elements

    @torch.no_grad()
    def step(self, prepared: Prepared, factor: Number, skip: Flag) -> None:
        """Gradients are multiplied by `factor`; where `skip`, nothing changes. Neither is read."""
        from echelon.update.precision.fused_adam_kernel import update

        chosen = [next(iter(self._optimizer.state))]
        inverse, flag = on_device(factor, chosen).reciprocal().float(), on_device(skip, chosen).float()
        for part in prepared.parts:
            torch._foreach_add_(part.steps, [1 - flag] * len(part.steps))  # a single tensor would be read
            steps = torch.stack(part.steps).double()
            update(part.table, steps, inverse, flag, self._optimizer.param_groups[part.group])
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers of torch look for it


def _is_readable(gradient: Tensor) -> bool:
    is_dense = gradient.layout is torch.strided and gradient.is_contiguous()
    return is_dense and gradient.data_ptr() % _ALIGNMENT == 0


def _lies_like(tensor: Tensor, master: Tensor) -> bool:
    is_aligned = tensor.data_ptr() % _ALIGNMENT == 0
    return is_aligned and tensor.shape == master.shape and tensor.is_contiguous() and master.is_contiguous()
