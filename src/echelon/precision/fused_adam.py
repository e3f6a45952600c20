"""Adam and AdamW over float32 masters in one pass on a CUDA device, which also rounds the weights.

torch's own kernel updates the masters, another one rounds the weights from them, and below float32 a third
one converts the gradients. Each reads again what the one before has written. `fused_adam_kernel` does all of
it while an element is at hand: 30 bytes per parameter, with float32 gradients.

The arithmetic is that of torch's fused kernel; step counters and moments stay in the optimizer's state.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.precision.optimizer_call import Factor, Skip, on_device
from echelon.precision.rounding import has_kernel

_ALIGNMENT = 16  # bytes: what the kernel reads at once


class Element(NamedTuple):
    """All that belongs to one master."""

    weight: Tensor
    gradient: Tensor
    master: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor


@final
class FusedAdam:
    """Updates masters and weights for an optimizer of torch, where it can (`elements`)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._tables: dict[tuple[int, int], Any] = {}  # of addresses, by group and first master

    def elements(
        self, weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]
    ) -> dict[nn.Parameter, Element] | None:
        """By master, if the kernel can update all of them: not their first time, which makes the state."""
        if not self._suits():
            return None
        elements = {}
        for weight, master in zip(weights, masters, strict=True):
            element = self._element(weight, master)
            if element is None:
                return None
            elements[master] = element
        types = {(each.weight.dtype, each.gradient.dtype) for each in elements.values()}
        return elements if len(types) == 1 else None

    def _suits(self) -> bool:
        return type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
            group["fused"]
            and not any(group[key] for key in ("amsgrad", "maximize", "capturable", "differentiable"))
            and not isinstance(group["lr"], Tensor)
            for group in self._optimizer.param_groups
        )

    def _element(self, weight: nn.Parameter, master: nn.Parameter) -> Element | None:
        state, gradient = self._optimizer.state.get(master), weight.grad
        if not state or gradient is None or gradient.layout is not torch.strided or not has_kernel(master):
            return None
        element = Element(
            weight.detach(), gradient, master.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]
        )
        return element if all(_lies_like(tensor, master) for tensor in element[:-1]) else None

    @torch.no_grad()
    def step(self, elements: dict[nn.Parameter, Element], factor: Factor, skip: Skip) -> None:
        """Gradients are multiplied by `factor`; where `skip`, nothing changes. Nobody waits for either."""
        from echelon.precision.fused_adam_kernel import Table, update

        inverse = on_device(factor, list(elements)).reciprocal().float()
        flag = on_device(skip, list(elements)).float()
        for number, group in enumerate(self._optimizer.param_groups):
            chosen = [elements[master] for master in group["params"] if master in elements]
            if not chosen:
                continue
            steps = [element.step for element in chosen]
            torch._foreach_add_(steps, [1 - flag] * len(steps))  # a single tensor would be read
            place = number, chosen[0].master.data_ptr()
            if place not in self._tables or not self._tables[place].is_of(chosen):
                self._tables[place] = Table(chosen)
            update(self._tables[place], torch.stack(steps).double(), inverse, flag, group)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers of torch look for it


def _lies_like(tensor: Tensor, master: Tensor) -> bool:
    is_aligned = tensor.data_ptr() % _ALIGNMENT == 0
    return is_aligned and tensor.shape == master.shape and tensor.is_contiguous() and master.is_contiguous()
