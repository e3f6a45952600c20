"""Hooks on weights with a limit that no gradient has reached yet, such as `g.clamp(-1, 1)`.

Where a step cuts the batch, a hook sees the gradient of a part of it, and one device's hook sees all of it.
What is linear comes to the same. The audit compares what hooks make of real gradients, and cannot see a limit
above these. So a hook that may change gradients is called once more, with the same gradient enlarged: one
that is linear enlarges its result as much.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.engine.audit.plain_form import is_own_hook
from echelon.errors import UserError
from echelon.plan import Plan

_LARGE = 1e6  # beyond any limit that is meant for gradients

_Hook = Callable[[Tensor], Any]


@contextmanager
def watched_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[dict[str, str]]:
    """Yield a dict, which gets the hooks that are called inside and have a limit, by the name of their
    weight."""
    found: dict[str, str] = {}
    with ExitStack() as stack:
        for name, parameter in parameters:
            by_kind: list[tuple[Callable[..., Any], dict[int, _Hook]]] = [
                (_call, parameter._backward_hooks or {}),
                (_call_accumulated, parameter._post_accumulate_grad_hooks or {}),
            ]
            for call, hooks in by_kind:
                for key, hook in list(hooks.items()):
                    if not is_own_hook(hook):
                        stack.callback(_put_back, hooks, key, hook)
                        hooks[key] = partial(call, found, name, hook)
        yield found


def refuse_limits(found: dict[str, str], plan: Plan) -> None:
    """Raise if a hook that was watched has a limit."""
    for name, hook in found.items():
        raise UserError(
            f"plan '{plan}': {hook} on {name} sees the gradient of a part of the batch, and what "
            "it makes of the parts does not add up to what it makes of the whole; use data=1, "
            "microbatches=1 and context=1, or, to clip the norm of the whole gradient, clip=… of "
            "parallelize"
        )


def _put_back(hooks: dict[int, _Hook], key: int, hook: _Hook) -> None:
    if key in hooks:  # a hook may have removed itself
        hooks[key] = hook


@torch.no_grad()
def _call(found: dict[str, str], name: str, hook: _Hook, gradient: Tensor) -> Any:
    before, version = gradient.detach().clone(), gradient._version
    result = hook(gradient)
    if result is not None or gradient._version != version:  # else it only reads
        changed = gradient if result is None else result

        def enlarge(large: Tensor) -> Tensor:
            of_large = hook(large)
            return large if of_large is None else of_large

        if not _is_linear(enlarge, before, changed):
            found[name] = "a hook (register_hook)"
    return result


@torch.no_grad()
def _call_accumulated(found: dict[str, str], name: str, hook: _Hook, parameter: Tensor) -> None:
    before = None if parameter.grad is None else parameter.grad.clone()
    hook(parameter)
    changed = parameter.grad
    if before is None or changed is None:  # the gradient was taken to be summed, or the hook has used it up
        return

    def enlarge(large: Tensor) -> Tensor | None:
        # Another parameter: a hook that updates what it is given must not do so by an enlarged gradient.
        like = nn.Parameter(torch.zeros_like(parameter))
        like.grad = large
        hook(like)
        return like.grad

    if not _is_linear(enlarge, before, changed):
        found[name] = "a hook (register_post_accumulate_grad_hook)"


def _is_linear(enlarge: Callable[[Tensor], Tensor | None], before: Tensor, changed: Tensor) -> bool:
    """Return whether the hook that made `changed` of `before` makes as many times `changed` of many times
    `before`."""
    size = float(before.abs().max()) if before.numel() and before.layout == torch.strided else 0.0
    info = torch.finfo(before.dtype)
    times = min(_LARGE, info.max**0.5) / size if size else 0.0
    if times <= 1:  # nothing to enlarge: real gradients tell
        return True
    try:
        enlarged = enlarge(before * times)
    except Exception:  # it guards against large gradients, or knows its own parameter and no other
        return True
    if enlarged is None:
        return False
    expected = changed * times
    scale = max(float(enlarged.abs().max()), float(expected.abs().max()))
    return bool(((enlarged - expected).abs() <= info.eps**0.5 * scale).all())
