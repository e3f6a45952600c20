"""The leaves of a graph: how often a backward pass comes by, the hooks of users, and what is no leaf."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, Node


def leaf_uses(roots: Iterable[Node | None]) -> Counter[Tensor]:
    """Return how many edges of the graph below these nodes lead to each leaf."""
    uses: Counter[Tensor] = Counter()
    pending, seen = list(roots), set[Node]()
    while pending:
        node = pending.pop()
        leaf = getattr(node, "variable", None)  # of AccumulateGrad alone
        if isinstance(leaf, Tensor):
            uses[leaf] += 1
        elif node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    return uses


def used_once(outputs: Sequence[GradientEdge]) -> Set[Tensor]:
    """Return the leaves that get one product from a backward pass, and no sum of several. What a reentrant
    checkpoint uses is not in the graph, and not among them."""
    return {leaf for leaf, number in leaf_uses(edge.node for edge in outputs).items() if number == 1}


# The user's hooks on gradients of weights, and twins of weights, which have the same hooks.


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


def is_hooked(parameter: nn.Parameter) -> bool:
    """Return whether a hook of the user sees gradients of the parameter."""
    return bool(late_hooks(parameter)) or not all(map(is_own_hook, hooks_of(parameter)))


def is_own_hook(hook: Any) -> bool:
    """Return whether a hook is one of an engine's."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("echelon.")


# Tensors that code may change in place: neither leaves nor views, which autograd makes exceptions for.


class _Enter(torch.autograd.Function):
    """Keeps the memory, as no leaf and no view: autograd makes exceptions for those (in hooks, in the order
    of its work), and forbids to change them in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # where none comes, there is none
        memory = leaf.new_empty(0)
        return memory.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(_: FunctionCtx, *gradients: Any) -> Any:
        return gradients[0]


def enter(leaf: Tensor) -> Tensor:
    """Return a received tensor as layers see it, at the start of a graph with a backward pass of its own."""
    function: Callable[[Tensor], Tensor] = _Enter.apply
    return function(leaf) if leaf.requires_grad else leaf


def product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.linear whose result is never a view: that of a custom function is not changed in place."""
    flat = F.linear(x.flatten(0, -2), matrix, bias)
    shaped: Tensor = torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], flat.shape[-1]))
    return shaped
