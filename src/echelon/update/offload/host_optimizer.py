"""The user's optimizer, called by another thread for some of its parameters.

The call works on a copy of the optimizer that shares its state, with the options of the moment at which it
was prepared: a learning rate that is set meanwhile is for the next update. Where torch has a fused kernel for
the CPU, and the user has left open how the optimizer works, the call uses that: one pass over memory.
"""

from collections.abc import Sequence, Set
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.update.optim.sum_optimizer import SumOptimizer
from echelon.update.precision.optimizer_call import make_momentum, may_fuse, restricted
from echelon.update.precision.stepper import takes_units

_STEP_HOOKS = {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}


@final
class HostCall:
    """One update of some parameters on the host, with the options of now."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._optimizer = _snapshot(optimizer, set(parameters))

    def __call__(self, factor: float) -> None:
        """All parameters have gradients, which are scaled by the factor, and may be changed."""
        for each in _inside(self._optimizer):
            _update(each, factor)


@final
class DirectCall:
    """The same with the optimizer itself, for one that must not be copied: in the thread of the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters

    def __call__(self, factor: float) -> None:
        _scale([p.grad for p in self._parameters if p.grad is not None], factor)
        with restricted(self._optimizer, self._parameters):
            self._optimizer.step()


def runs_beside(optimizer: torch.optim.Optimizer) -> bool:
    """Whether another thread may update: the optimizer is a known one, nobody watches its steps, and ranks
    do not talk in them."""
    return takes_units(optimizer) and not talks(optimizer)


def talks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ranks add up sums in its steps."""
    sums = [each for each in _inside(optimizer) if isinstance(each, SumOptimizer)]
    return any(work.exchange.rounds for each in sums for work in each._work)


def _inside(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    inside: Sequence[torch.optim.Optimizer] = getattr(optimizer, "optimizers", (optimizer,))
    return inside


def _snapshot(optimizer: torch.optim.Optimizer, chosen: Set[nn.Parameter]) -> torch.optim.Optimizer:
    """Another optimizer of this kind over the chosen parameters, which shares the state of this one."""
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    for name in _STEP_HOOKS & vars(optimizer).keys():  # those added later are for the next update
        setattr(copy, name, vars(optimizer)[name].copy())
    vars(copy).pop("step", None)  # that of a learning-rate scheduler, which calls the original
    copy.param_groups = [_options(group, chosen) for group in optimizer.param_groups]
    if hasattr(optimizer, "optimizers"):
        copy.optimizers = [_snapshot(each, chosen) for each in _inside(optimizer)]  # type: ignore[attr-defined]
    return copy


def _options(group: dict[str, Any], chosen: Set[nn.Parameter]) -> dict[str, Any]:
    options = {key: _copied(value) for key, value in group.items()}
    options["params"] = [parameter for parameter in group["params"] if parameter in chosen]
    return options


def _copied(value: Any) -> Any:
    """A learning rate may be a tensor, on a device even."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _update(optimizer: torch.optim.Optimizer, factor: float) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not may_fuse(optimizer) or not gradients:
        _scale(gradients, factor)
        optimizer.step()
        return
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    make_momentum(optimizer, parameters)
    # The kernel reads a float32 scale, which is too coarse for float64 gradients.
    if factor != 1.0 and all(gradient.dtype == torch.float32 for gradient in gradients):
        optimizer.grad_scale = torch.full((), 1.0 / factor)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    else:
        _scale(gradients, factor)
    optimizer.step()


def _scale(gradients: list[Tensor], factor: float) -> None:
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
