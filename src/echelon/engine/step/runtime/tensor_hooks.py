"""Whether a forward pass hooks into its own backward pass: hooks on tensors, and on nodes of the graph.

A node does not say which of its tensors have hooks, so they are noticed when they are set. A pass that runs a
node twice, or for some of its inputs alone, would run such hooks twice, or show them half of the gradients.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


class HookWatch:
    """`is_hooked`: a tensor that was computed while this watched has a hook, or keeps its gradient."""

    def __init__(self) -> None:
        self.is_hooked = False


@contextmanager
def watch_hooks() -> Iterator[HookWatch]:
    """Notice `register_hook` and `retain_grad` of tensors that are no leaves, until the end of the block."""
    watch = HookWatch()
    originals = {name: getattr(Tensor, name) for name in ("register_hook", "retain_grad")}
    inherited = [name for name in originals if name not in vars(Tensor)]
    for name, original in originals.items():
        setattr(Tensor, name, _noticed(watch, original))
    try:
        yield watch
    finally:
        for name, original in originals.items():
            if name in inherited:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, original)


def _noticed(watch: HookWatch, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        watch.is_hooked = watch.is_hooked or not tensor.is_leaf
        return original(tensor, *args, **kwargs)

    return call


def have_hooks(nodes: Iterable[Node]) -> bool:
    """Whether somebody has set a hook on one of these nodes, to be called before or after it."""
    return any(_has_others(node.register_prehook) or _has_others(node.register_hook) for node in nodes)


def _has_others(register: Callable[[Callable[..., None]], torch.utils.hooks.RemovableHandle]) -> bool:
    """Whether a new hook is not the only one: its handle refers to all of them."""
    handle = register(_do_nothing)
    try:
        hooks = handle.hooks_dict_ref()
        return hooks is not None and len(hooks) > 1
    finally:
        handle.remove()


def _do_nothing(*_: object) -> None:
    pass
