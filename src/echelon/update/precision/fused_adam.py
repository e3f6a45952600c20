"""Adam and AdamW over float32 masters in one pass on a CUDA device, which also rounds the weights.

torch's own kernel updates the masters, another one rounds the weights from them, and below float32 a third
one converts the gradients. Each reads again what the one before has written. `fused_adam_kernel` does all of
it while an element is at hand: 30 bytes per parameter, with float32 gradients.

The arithmetic is that of torch's fused kernel; step counters and moments stay in the optimizer's state.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.update.numbers import Flag, Number
from echelon.update.precision.flat_memory import has_kernel
from echelon.update.precision.optimizer_call import on_device

_ALIGNMENT = 16  # bytes: what the kernel reads at once


class Element(NamedTuple):
    weight: Tensor
    gradient: Tensor
    master: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor


@final
class Prepared:
    """Arguments of the kernel for some masters, valid while all of it lies where it lay.

    It holds no gradient: those of the next step may need the memory.
    """

    def __init__(self, elements: Sequence[Sequence[Element]], addresses: list[int]) -> None:
        """`elements`: of each parameter group."""
        from echelon.update.precision.fused_adam_kernel import Table

        self._addresses = addresses
        self._gradient_type = next(each.gradient.dtype for group in elements for each in group)
        self.tables = [Table(group) if group else None for group in elements]
        self.steps = [[each.step for each in group] for group in elements]

    def holds(self, gradients: Sequence[Tensor | None], addresses: list[int]) -> bool:
        return addresses == self._addresses and all(
            gradient is not None and gradient.is_contiguous() and gradient.dtype == self._gradient_type
            for gradient in gradients
        )


@final
class FusedAdam:
    """Updates masters and weights for an optimizer of torch, where it can (`prepare`)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._prepared: dict[nn.Parameter, Prepared] = {}  # by the first master

    def prepare(self, weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> Prepared | None:
        """If the kernel can update all of the masters: not their first time, which makes the state."""
        if not masters or not self._suits():
            return None
        addresses = self._addresses(weights, masters)
        if addresses is None:
            return None
        known = self._prepared.get(masters[0])
        if known is not None and known.holds([weight.grad for weight in weights], addresses):
            return known
        elements = self._elements(weights, masters)
        if elements is None:
            return None
        groups = [
            [elements[master] for master in group["params"] if master in elements]
            for group in self._optimizer.param_groups
        ]
        self._prepared[masters[0]] = Prepared(groups, addresses)
        return self._prepared[masters[0]]

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
        """Return the addresses of all that belongs to the masters; None without state or gradient."""
        addresses = []
        for weight, master in zip(weights, masters, strict=True):
            state, gradient = self._optimizer.state.get(master), weight.grad
            if not state or gradient is None or gradient.layout is not torch.strided:
                return None
            moments = (state["exp_avg"], state["exp_avg_sq"], state["step"])
            addresses += [tensor.data_ptr() for tensor in (weight, gradient, master, *moments)]
        return addresses

    def _elements(
        self, weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]
    ) -> dict[nn.Parameter, Element] | None:
        """All of each master, with its state and gradient; None where the kernel takes no such tensors."""
        elements = {}
        for weight, master in zip(weights, masters, strict=True):
            state, gradient = self._optimizer.state[master], weight.grad
            assert gradient is not None
            moments = (state["exp_avg"], state["exp_avg_sq"], state["step"])
            element = Element(weight.detach(), gradient.detach(), master.detach(), *moments)
            if not has_kernel(master) or not all(_lies_like(tensor, master) for tensor in element[:-1]):
                return None
            elements[master] = element
        types = {(each.weight.dtype, each.gradient.dtype) for each in elements.values()}
        return elements if len(types) == 1 else None

    @torch.no_grad()
    def step(self, prepared: Prepared, factor: Number, skip: Flag) -> None:
        """Gradients are multiplied by `factor`; where `skip`, nothing changes. Neither is read."""
        from echelon.update.precision.fused_adam_kernel import update

        chosen = [next(iter(self._optimizer.state))]
        inverse, flag = on_device(factor, chosen).reciprocal().float(), on_device(skip, chosen).float()
        groups = zip(self._optimizer.param_groups, prepared.tables, prepared.steps, strict=True)
        for group, table, steps in groups:
            if table is not None:
                torch._foreach_add_(steps, [1 - flag] * len(steps))  # a single tensor would be read
                update(table, torch.stack(steps).double(), inverse, flag, group)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers of torch look for it


def _lies_like(tensor: Tensor, master: Tensor) -> bool:
    is_aligned = tensor.data_ptr() % _ALIGNMENT == 0
    return is_aligned and tensor.shape == master.shape and tensor.is_contiguous() and master.is_contiguous()
