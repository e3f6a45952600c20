"""One call of an optimizer, with gradients scaled by a factor, or no call at all.

Number and skip flag are results of the step: 0-dim tensors on the device. On the CPU they are read, which
costs nothing. To read them from a CUDA device would stop the host until the backward pass is done. There a
fused optimizer takes both on the device, by the protocol of torch's GradScaler:

    optimizer.grad_scale   gradients are divided by it, inside the kernel that updates
    optimizer.found_inf    where it is 1, the kernel changes nothing, and step counters go back
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from echelon.update.numbers import Flag, Number
from echelon.update.optim.sum_optimizer import SumOptimizer
from echelon.update.precision.flat_memory import have_same_layout

# torch's optimizers with a fused kernel, and its name. Not Adagrad, whose kernel torch 2.11 refuses on CUDA.
_FUSED = {
    torch.optim.Adam: "_fused_adam_",
    torch.optim.AdamW: "_fused_adamw_",
    torch.optim.SGD: "_fused_sgd_",
}


class OptimizerCall(ABC):
    """One way to call `optimizer.step` for parameters whose gradients are to be scaled."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @abstractmethod
    def __call__(self, parameters: Sequence[nn.Parameter], factor: Number, skip: Flag) -> None:
        """Update `parameters`, all of which have gradients, unless `skip`. Gradients may be changed."""

    @abstractmethod
    def readable(self, skip: Flag) -> Flag:
        """`skip` as a bool, if all calls of a step would read it: to be read once."""


@final
class HostCall(OptimizerCall):
    def readable(self, skip: Flag) -> Flag:
        return bool(skip)

    def __call__(self, parameters: Sequence[nn.Parameter], factor: Number, skip: Flag) -> None:
        if skip:
            return
        gradients, scale = _gradients(parameters), float(factor)
        if gradients and scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        self._optimizer.step()


@final
class DeviceCall(OptimizerCall):
    """Reads nothing, where the optimizer can take factor and skip on the device.

    Three exceptions. The first update of a parameter reads `skip`: it makes the optimizer's state, which a
    skipped update must not (that of an optimizer which ranks call alike, new parameters or not, stays zero
    instead). For an optimizer without the protocol `skip` is read in every step, and for one
    with step hooks too: they are called only for updates, and see the gradients that the update uses.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._updated: set[nn.Parameter] = set()
        self._chose_fused = may_fuse(optimizer)
        if self._chose_fused:
            _set_fused(optimizer, fused=True)
        self._takes_flags = _has_protocol(optimizer)
        self._needs_flags = type(optimizer) not in _FUSED  # others may read them in each step
        self._starts_on_device = isinstance(optimizer, SumOptimizer)

    def __call__(self, parameters: Sequence[nn.Parameter], factor: Number, skip: Flag) -> None:
        is_one = not isinstance(factor, Tensor) and factor == 1.0
        scale = None if is_one and not self._needs_flags else on_device(factor, parameters)
        new = [p for p in parameters if p not in self._updated]
        on_host = self._reads_skip
        if (on_host or (new and not self._starts_on_device)) and skip:
            return
        self._prepare(new)
        if self._takes_flags and not on_host:
            self._step_on_device(parameters, scale, skip)
        else:
            if scale is not None:
                _scale(parameters, scale)
            self._optimizer.step()

    def readable(self, skip: Flag) -> Flag:
        return bool(skip) if self._reads_skip else skip

    @property
    def _reads_skip(self) -> bool:
        return not self._takes_flags or has_step_hooks(self._optimizer)

    def _prepare(self, new: Sequence[nn.Parameter]) -> None:
        """Before the first update of parameters. What a fused kernel does not take is left to torch's
        default: sparse gradients, and those that lie in memory unlike their parameter."""
        if self._chose_fused and not all(_suits_kernel(p) for p in new):
            _set_fused(self._optimizer, fused=False)
            self._chose_fused = self._takes_flags = False
        if self._takes_flags:
            make_momentum(self._optimizer, new)
        self._updated.update(new)

    def _step_on_device(self, parameters: Sequence[nn.Parameter], scale: Tensor | None, skip: Flag) -> None:
        """`scale`: None where gradients are those of the mean. Kernels that are given one write gradients."""
        optimizer: torch.optim.Optimizer = self._optimizer
        attributes: dict[str, Tensor] = {}
        if scale is not None:
            # The kernels read float32 of it, which is too coarse for float64 gradients.
            if all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters):
                attributes["grad_scale"] = scale.reciprocal().float()
            else:
                _scale(parameters, scale)
        if self._needs_flags or skip is not False:
            attributes["found_inf"] = on_device(skip, parameters).float()
        vars(optimizer).update(attributes)
        try:
            optimizer.step()
        finally:
            for name in attributes:
                delattr(optimizer, name)


def make_momentum(optimizer: torch.optim.Optimizer, new: Sequence[nn.Parameter]) -> None:
    """The fused SGD takes momentum for all parameters or for none, and some may be used later than others.
    Momentum that starts at zero is the same, without dampening."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for parameter in set(new).intersection(group["params"]):
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


@contextmanager
def restricted(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let the optimizer see these parameters alone: others may have gradients that are not complete."""
    chosen = set(parameters)
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    for group, of_group in groups:
        group["params"] = [parameter for parameter in of_group if parameter in chosen]
    try:
        yield
    finally:
        for group, of_group in groups:
            group["params"] = of_group


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks, beside the engine's, hear of the steps of this optimizer or of all."""
    own = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = (  # some wrappers of optimizers never call Optimizer.__init__
        *(getattr(optimizer, name, None) or {} for name in own),
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(not hook.__module__.startswith("echelon.engine") for each in hooks for hook in each.values())


def may_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is one of torch's with a fused kernel, and the user left open how it works."""
    kernel = _FUSED.get(type(optimizer))
    if kernel is None or not all(_leaves_choice(group) for group in optimizer.param_groups):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = {parameter.device.type.upper() for parameter in parameters}
    return all(p.is_floating_point() for p in parameters) and all(
        has_kernel(f"aten::{kernel}", key) for key in keys
    )


def _leaves_choice(group: dict[str, object]) -> bool:
    is_default = group["fused"] is None and group["foreach"] is None and not isinstance(group["lr"], Tensor)
    return is_default and not any(group.get(key) for key in ("capturable", "differentiable", "dampening"))


def _set_fused(optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
    for group in optimizer.param_groups:
        group["fused"] = True if fused else None
    optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]


def _has_protocol(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it reads `grad_scale` and `found_inf`."""
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and "grad_scaler" not in inspect.signature(optimizer.step).parameters
        and all(group.get("fused", True) for group in optimizer.param_groups)
    )


def _suits_kernel(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return (
        gradient is not None
        and not gradient.is_sparse
        and gradient.dtype == parameter.dtype
        and have_same_layout(gradient, parameter)
    )


def on_device(factor: Number | Flag, parameters: Sequence[Tensor]) -> Tensor:
    """The factor, or the flag, where the parameters are, without a wait for the device."""
    if isinstance(factor, Tensor):
        return factor.double()
    device = parameters[0].device if parameters else None
    return torch.full((), factor, dtype=torch.float64, device=device)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _scale(parameters: Sequence[nn.Parameter], scale: Tensor) -> None:
    """Multiply gradients on the device, with one kernel for each type."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in _gradients(parameters):
        values = gradient._values() if gradient.is_sparse else gradient
        by_type.setdefault(values.dtype, []).append(values)
    for dtype, of_type in by_type.items():
        torch._foreach_mul_(of_type, scale.to(dtype))
