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

from echelon.errors import UserError
from echelon.nn.autograd.leaves import is_own_hook
from echelon.plan import Plan

_LARGE = 1e6  # beyond any limit that is meant for gradients


@contextmanager
def watched_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[dict[str, str]]:
    """Yield a dict, which gets the hooks that are called inside and have a limit, by the name of their
    weight."""
    found: dict[str, str] = {}
    with ExitStack() as stack:
        for name, parameter in parameters:
            kinds: list[tuple[str, Callable[..., Any], dict[int, Any] | None]] = [
                ("register_hook", _watch, parameter._backward_hooks),
                ("register_post_accumulate_grad_hook", _watch_late, parameter._post_accumulate_grad_hooks),
            ]
            for register, watch, hooks in kinds:
                for key, hook in list((hooks or {}).items()):
                    if hooks is not None and not is_own_hook(hook):
                        stack.callback(_put_back, hooks, key, hook)
                        hooks[key] = partial(watch, partial(found.__setitem__, name, register), hook)
        yield found


def refuse_limits(found: dict[str, str], plan: Plan) -> None:
    """Raise if a hook that was watched has a limit."""
    for name, register in found.items():
        raise UserError(
            f"plan '{plan}': a hook ({register}) on {name} sees the gradient of a part of the batch, and "
            "what it makes of the parts does not add up to what it makes of the whole; use data=1, "
            "microbatches=1 and context=1, or, to clip the norm of the whole gradient, clip=… of parallelize"
        )


def _put_back(hooks: dict[int, Any], key: int, hook: Any) -> None:
    if key in hooks:  # a hook may have removed itself
        hooks[key] = hook


@torch.no_grad()
def _watch(note: Callable[[], None], hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Any:
    before, version = gradient.detach().clone(), gradient._version
    result = hook(gradient)
    if result is not None or gradient._version != version:  # else it only reads
        _compare_enlarged(note, hook, before, gradient if result is None else result)
    return result


@torch.no_grad()
def _watch_late(note: Callable[[], None], hook: Callable[[Tensor], None], parameter: Tensor) -> None:
    before = None if parameter.grad is None else parameter.grad.clone()
    hook(parameter)

    def apply(gradient: Tensor) -> Tensor:
        # To another parameter: a hook that updates its own must not do so by an enlarged gradient.
        like = nn.Parameter(torch.zeros_like(parameter))
        like.grad = gradient
        hook(like)
        return torch.zeros_like(gradient) if like.grad is None else like.grad

    if before is not None and parameter.grad is not None:  # else it was taken to be summed, or used up
        _compare_enlarged(note, apply, before, parameter.grad)


def _compare_enlarged(
    note: Callable[[], None], hook: Callable[[Tensor], Tensor | None], before: Tensor, changed: Tensor
) -> None:
    """Note a hook that made `changed` of `before`, and does not enlarge it as much as `before`."""
    size = float(before.abs().max()) if before.numel() and before.layout == torch.strided else 0.0
    info = torch.finfo(before.dtype)
    times = min(_LARGE, info.max**0.5) / size if size else 0.0
    if times <= 1:  # nothing to enlarge: real gradients tell
        return
    enlarged = before * times
    try:
        result = hook(enlarged)
    except Exception:  # it guards against large gradients, or knows its own parameter and no other
        return
    gap = (enlarged if result is None else result) - changed * times
    if not bool((gap.abs() <= info.eps**0.5 * (changed * times).abs().max()).all()):
        note()
