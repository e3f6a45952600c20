"""Hooks on the tensors that autograd saves: those that only observe, and those that compute them again.

A layer may be computed in another way than the time before (all matrices of one input at once). That is
right unless hooks record what autograd saves in order to compute it again, as torch.utils.checkpoint does:
the second time must save the same. The memory meter only counts, through `observe`. Code that computes again
in the very way of the first time sets its hooks through `replace`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Hooks(NamedTuple):
    """Two functions: what to keep of a tensor that autograd saves, and how to get it back."""

    pack: Pack
    unpack: Unpack


_DISABLE = "disable_saved_tensors_hooks"
_TORCHS_DISABLE = getattr(torch.autograd.graph, _DISABLE)

_observers: list[Pack] = []
_replacing: list[Pack] = []
_observed: dict[int, Hooks] = {}  # by the pack of `_replacing` that holds for them what is kept


@contextmanager
def observe(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Set hooks as torch's saved_tensors_hooks does, for hooks that return the very tensors they get."""
    setattr(torch.autograd.graph, _DISABLE, _disable_hooks)
    try:
        with _listed(_observers, pack), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        if not _observers:
            setattr(torch.autograd.graph, _DISABLE, _TORCHS_DISABLE)


@contextmanager
def _disable_hooks(error_message: str) -> Iterator[None]:
    """Disable hooks as torch does, with which torch.func refuses to run where hooks are set; observers are
    taken away meanwhile."""
    observers = []
    while (hooks := current_hooks()) is not None and _is_among(hooks, _observers):
        torch._C._autograd._pop_saved_tensors_default_hooks()
        observers.append(hooks)
    try:
        with _TORCHS_DISABLE(error_message):
            yield
    finally:
        for hooks in reversed(observers):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


@contextmanager
def replace(pack: Pack, unpack: Unpack, observer: Hooks | None = None) -> Iterator[None]:
    """Set hooks as torch's saved_tensors_hooks does, for hooks that compute tensors again in the same way.
    `observer` observes what they keep."""
    if observer is not None:
        _observed[id(pack)] = observer
    try:
        with _listed(_replacing, pack), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _observed.pop(id(pack), None)


@contextmanager
def _listed(hooks: list[Pack], pack: Pack) -> Iterator[None]:
    hooks.append(pack)
    try:
        yield
    finally:
        hooks.remove(pack)


def current_hooks() -> Hooks | None:
    """Return the innermost hooks, which autograd asks here."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else Hooks(*hooks)


def current_observer() -> Hooks | None:
    """Return the innermost hooks if they only observe; else the observer of what they keep."""
    hooks = current_hooks()
    if hooks is None or _is_among(hooks, _observers):
        return hooks
    return _observed.get(id(hooks.pack))


def is_recorded() -> bool:
    """Return True if other hooks record what autograd saves here."""
    hooks = current_hooks()
    return hooks is not None and not _is_among(hooks, [*_observers, *_replacing])


def _is_among(hooks: Hooks, known: list[Pack]) -> bool:
    return any(hooks.pack is pack for pack in known)


@final
class KeptTensor:
    """A tensor that is kept for the backward pass, without its history, in the way of the hooks around."""

    __slots__ = ("_hooks", "_packed", "_version")

    def __init__(self, tensor: Tensor, hooks: Hooks | None) -> None:
        detached = tensor.detach()
        self._hooks, self._version = hooks, detached._version
        self._packed: Any = detached if hooks is None else hooks.pack(detached)

    def take(self) -> Tensor:
        if self._hooks is not None:
            return self._hooks.unpack(self._packed)
        tensor: Tensor = self._packed
        check_unchanged(tensor, self._version)
        return tensor


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Refuse a tensor that was changed since: autograd does not check where hooks are set."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward pass needs was changed in place "
            "after the forward pass had saved it; replace the in-place operation"
        )
