"""The user's hooks on gradients of weights, and twins of weights, which have the same hooks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

Hook = Callable[[Tensor], Any]


def twin(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Make another leaf of autograd with this data, and the hooks of `parameter`."""
    leaf = nn.Parameter(data, requires_grad=parameter.requires_grad)
    set_hooks(leaf, hooks_of(parameter), late_hooks(parameter))
    return leaf


def set_hooks(parameter: nn.Parameter, hooks: Sequence[Hook], late: Sequence[Hook]) -> None:
    for hook in hooks:
        parameter.register_hook(hook)
    for hook in late:
        parameter.register_post_accumulate_grad_hook(hook)


def hooks_of(parameter: nn.Parameter) -> list[Hook]:
    return list((parameter._backward_hooks or {}).values())


def late_hooks(parameter: nn.Parameter) -> list[Hook]:
    """List the user's hooks on accumulated gradients, which `torch.autograd.grad` does not call."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return [hook for hook in hooks.values() if not is_own_hook(hook)]


def is_own_hook(hook: Any) -> bool:
    """Return whether a hook is one of an engine's."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("echelon.")
