"""Uses: the times during a step when a module needs its units whole, found by hooks.

A use is one call of a module's forward. It holds its units from just before the forward to just after it,
and again from the moment the gradient of its output is there to the moment the gradients of its inputs are:

    forward     [enter ── forward ── leave]
    backward                     [enter ── backward ── leave]

A module that is called twice has two uses. One without inputs that need gradients (the embedding of tokens)
leaves when the whole backward pass is over, or earlier when the owner of the hooks finds its unit complete.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


class Use:
    """One call of a module's forward: which units it needs, and whether its backward pass is under way."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.watched = False  # an input's gradient will tell when the backward pass is through
        self.in_backward = False
        self.over = False


class UseHooks:
    """Watches modules and tells `enter(use, backward)` and `leave(use)`."""

    def __init__(
        self,
        modules: list[nn.Module],
        enter: Callable[[Use, bool], None],
        leave: Callable[[Use], None],
    ) -> None:
        self._enter, self._leave = enter, leave
        self._calls: dict[nn.Module, list[Use]] = {module: [] for module in modules}
        for unit, module in enumerate(modules):
            module.register_forward_pre_hook(self._before(unit), with_kwargs=True, prepend=True)
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def _before(self, unit: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            use = Use(unit)
            self._calls[module].append(use)
            self._enter(use, False)
            return self._watch_inputs(use, args, kwargs) if torch.is_grad_enabled() else None

        return hook

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        use = self._calls[module].pop()
        self._leave(use)
        for tensor in tree_leaves(output):  # nothing, when the forward has raised
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin_backward(use))

    def _begin_backward(self, use: Use) -> None:
        if not use.in_backward and not use.over:
            use.in_backward = True
            self._enter(use, True)

    def end_backward(self, use: Use) -> None:
        """The use needs its units no more; calling it again changes nothing."""
        if use.in_backward:
            use.in_backward = False
            use.over = True
            self._leave(use)

    def _watch_inputs(self, use: Use, args: Any, kwargs: Any) -> Any:
        """The same inputs, behind a node whose backward runs when all their gradients are there."""
        leaves, structure = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places:
            return None
        use.watched = True
        over = partial(self.end_backward, use)
        watched: Any = _Watch.apply(over, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, watched, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, structure)


class _Watch(torch.autograd.Function):
    """The identity; calls back when the backward pass comes through."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.call()
        return (None, *gradients)
