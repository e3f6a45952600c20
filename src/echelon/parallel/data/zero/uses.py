"""Uses: the times during a step when a module needs gathered units, found by hooks.

A use is one call of a module's forward. It holds its units from just before the forward to just after it,
and again from the moment the gradient of its output is there to the moment the gradients of its inputs are:

    forward     [enter ── forward ── leave]
    backward                     [enter ── backward ── leave]

A module that is called twice has two uses. One without inputs that need gradients (the embedding of tokens),
or with inputs that are leaves, leaves when the whole backward pass is over, or earlier when the owner of the
hooks finds its unit complete.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from echelon.nn.tracing import untraced
from echelon.nn.wrapping import Wrapping


class Use:
    """One call of a module's forward: which units it needs, and whether its backward pass is under way."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.watched = False  # an input's gradient will tell when the backward pass is through
        self.in_backward = False
        self.over = False


class UseHooks:
    """Watches modules and calls `enter(use, backward)`, `leave(use)` and `returned(use, tensor)`."""

    def __init__(
        self,
        modules: list[nn.Module],
        wrapping: Wrapping,
        enter: Callable[[Use, bool], None],
        leave: Callable[[Use], None],
        returned: Callable[[Use, Tensor], None],
    ) -> None:
        self._enter, self._leave, self._returned = enter, leave, returned
        self._units = {module: unit for unit, module in enumerate(modules)}
        self._calls: dict[nn.Module, list[Use]] = {module: [] for module in modules}
        # A watched module's output → the uses that it is the only input of.
        self._consumers: MutableMapping[Tensor, list[Use]] = WeakIdKeyDictionary()
        for unit, module in enumerate(modules):
            wrapping.before("gather", module, self._before(unit), with_kwargs=True, prepend=True)
            wrapping.after("gather", module, self._after, with_kwargs=True, always_call=True)

    def unit_of(self, module: nn.Module) -> int | None:
        """The unit of a module that is watched."""
        return self._units.get(module)

    def _before(self, unit: int) -> Callable[..., Any]:
        @untraced
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            use = Use(unit)
            self._calls[module].append(use)
            self._enter(use, False)
            if torch.is_grad_enabled():
                self._watch_inputs(use, args, kwargs)

        return hook

    @untraced
    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        use = self._calls[module].pop()
        for tensor in _tensors(output):  # nothing, when the forward has raised
            self._returned(use, tensor)
            # A hook on a leaf would stay forever, and a leaf has no backward pass of this module behind it.
            if tensor.requires_grad and not tensor.is_leaf:
                consumers = self._consumers.setdefault(tensor, [])
                tensor.register_hook(lambda _, consumers=consumers: self._begin_backward(use, consumers))
        self._leave(use)

    def _begin_backward(self, use: Use, consumers: list[Use]) -> None:
        """The gradient of an output is there: whoever had only it as input is through, and lets go first."""
        for consumer in consumers:
            self.end_backward(consumer)
        if not use.in_backward and not use.over:
            use.in_backward = True
            self._enter(use, True)

    def end_backward(self, use: Use) -> None:
        """The use needs its units no more; calling it again changes nothing."""
        if use.in_backward:
            use.in_backward = False
            use.over = True
            self._leave(use)

    def _watch_inputs(self, use: Use, args: Any, kwargs: Any) -> None:
        """Learn when the gradients of all inputs are there: then the backward pass is through the module."""
        inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
        # Autograd may tell of a leaf before it tells of the module's own weights, which are leaves too. The
        # inputs of a reentrant checkpoint are.
        if inputs and not any(tensor.is_leaf for tensor in inputs):
            use.watched = True
            if len(inputs) == 1 and inputs[0] in self._consumers:
                self._consumers[inputs[0]].append(use)
            register_multi_grad_hook(inputs, lambda _: self.end_backward(use))


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Every tensor in a structure; also in objects that torch does not look into, a few levels deep."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, type | nn.Module):
            yield from _tensors(_attributes(leaf), depth - 1)


def _attributes(value: object) -> list[Any]:
    """What an object holds by name, in its slots too."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
