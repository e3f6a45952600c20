"""Hooks of the user on weights, where a step cuts the batch: each call then sees a part of the gradient, and
one device's hook sees all of it. What is linear comes to the same; what clips or adds does not.

Hooks that change gradients are tried in the first step, on made-up ones. Those that only look are left alone.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.engine.audit.plain_form import is_own_hook
from echelon.errors import UserError
from echelon.plan import Plan

_Hook = Callable[[Tensor], Any]


@final
class WeightHooks:
    """Watches the hooks on parameters while gradients are computed."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], plan: Plan) -> None:
        self._parameters, self._plan = parameters, plan
        self._refused: dict[str, str] = {}  # by name of the parameter

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Hooks that are called inside are looked at."""
        self._refused.clear()
        replaced: list[tuple[MutableMapping[int, _Hook], int, _Hook]] = []
        for name, parameter in self._parameters:
            for watched, hooks in zip((self._watched, self._late), _hooks(parameter), strict=True):
                for key, hook in list(hooks.items()):
                    if not is_own_hook(hook):
                        hooks[key] = partial(watched, name, hook)
                        replaced.append((hooks, key, hook))
        try:
            yield
        finally:
            for hooks, key, hook in replaced:
                if key in hooks:  # a hook may have removed itself
                    hooks[key] = hook

    def check(self) -> None:
        """Raise if a hook would see something else than one device's."""
        for name, hook in self._refused.items():
            raise UserError(
                f"plan '{self._plan}': {hook} on {name} sees the gradient of a part of the batch, and what "
                "it makes of the parts does not add up to what it makes of the whole; use data=1, "
                "microbatches=1 and context=1, or, to clip the norm of the whole gradient, clip=… of "
                "parallelize"
            )

    def _watched(self, name: str, hook: _Hook, gradient: Tensor) -> Any:
        before, version = gradient.detach().clone(), gradient._version
        result = hook(gradient)
        looks = result is None and gradient._version == version
        if not looks and name not in self._refused and not _is_linear(hook, before):
            self._refused[name] = "a hook (register_hook)"
        return result

    def _late(self, name: str, hook: _Hook, parameter: Tensor) -> None:
        before = parameter.grad
        if before is None or name in self._refused:  # whoever reduces it has taken it already
            hook(parameter)
            return
        would_change, version = _changes_gradient(hook, parameter, before), before._version
        hook(parameter)
        if would_change or parameter.grad is not before or before._version != version:
            self._refused[name] = "a hook (register_post_accumulate_grad_hook)"


def _hooks(parameter: nn.Parameter) -> tuple[MutableMapping[int, _Hook], MutableMapping[int, _Hook]]:
    """Those that are called with a gradient, and those that are called when it is accumulated."""
    return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}


@torch.no_grad()
def _is_linear(hook: _Hook, gradient: Tensor) -> bool:
    """Whether what it makes of two gradients adds up to what it makes of their sum, at several sizes."""
    if gradient.layout != torch.strided:
        return False
    direction = _made_up(gradient)
    size = float(gradient.abs().max()) if gradient.numel() else 0.0
    unit = gradient / size if size else direction.flip(0)
    largest = min(1e6, torch.finfo(gradient.dtype).max ** 0.5)
    return all(_adds_up(hook, unit * scale, direction * scale) for scale in (size or 1.0, 1e-3, largest))


def _adds_up(hook: _Hook, one: Tensor, other: Tensor) -> bool:
    results = [_apply(hook, each) for each in (one, other, one + other)]
    size = max(float(result.abs().max()) for result in results) if one.numel() else 0.0
    error = results[2] - results[0] - results[1]
    return bool((error.abs() <= torch.finfo(one.dtype).eps ** 0.5 * size).all())


def _apply(hook: _Hook, gradient: Tensor) -> Tensor:
    copy = gradient.clone()
    result = hook(copy)
    return copy if result is None else result


@torch.no_grad()
def _changes_gradient(hook: _Hook, parameter: Tensor, gradient: Tensor) -> bool:
    """Whether it changes a gradient that is larger than any limit, of a parameter of this form."""
    if gradient.layout != torch.strided:
        return False
    like = nn.Parameter(torch.zeros(parameter.shape, dtype=gradient.dtype, device=gradient.device))
    trial = _made_up(gradient) * 1e6
    like.grad = trial.clone()
    try:
        hook(like)
    except Exception:  # it knows the parameter itself, and no other; its own call tells
        return False
    return like.grad is None or not torch.equal(like.grad, trial)


def _made_up(gradient: Tensor) -> Tensor:
    places = torch.arange(gradient.numel(), dtype=torch.float64, device=gradient.device)
    return (places * 1.7 + 0.3).cos().to(gradient.dtype).view(gradient.shape)
