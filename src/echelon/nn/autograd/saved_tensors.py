"""What autograd saves for the backward pass: who only looks on, and who takes note to compute it again.

A layer may be computed in another way than the time before (all matrices of one input at once). That is
right unless somebody takes note of what autograd saves in order to compute it again, as a checkpoint does:
the second time must save the same. The memory meter only counts, through `observe`. Who computes again in the
very way of the first time says so, through `replace`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Hooks(NamedTuple):
    """What is done with a tensor that autograd saves, and to get it back."""

    pack: Pack
    unpack: Unpack


_DISABLE = "disable_saved_tensors_hooks"
_TORCHS_DISABLE = getattr(torch.autograd.graph, _DISABLE)

_observers: list[Pack] = []
_replacing: list[Pack] = []
_observed: dict[int, Hooks] = {}  # by the pack of `_replacing` that holds for them what is kept


@contextmanager
def observe(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """As torch's saved_tensors_hooks, for hooks that give back the very tensors that they were given."""
    setattr(torch.autograd.graph, _DISABLE, _disable_hooks)
    try:
        with _listed(_observers, pack), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        if not _observers:
            setattr(torch.autograd.graph, _DISABLE, _TORCHS_DISABLE)


@contextmanager
def _disable_hooks(error_message: str) -> Iterator[None]:
    """As torch's, with which torch.func refuses to run where hooks are set; but those that only look on are
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
    """As torch's saved_tensors_hooks, for hooks that compute tensors again in the way of the first time.
    `observer`: looks on at what they keep."""
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
    """Those that are asked here: the innermost."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else Hooks(*hooks)


def current_observer() -> Hooks | None:
    """The same, if they only look on; or who looks on at what they keep."""
    hooks = current_hooks()
    if hooks is None or _is_among(hooks, _observers):
        return hooks
    return _observed.get(id(hooks.pack))


def is_recorded() -> bool:
    """Whether somebody else takes note of what autograd saves here."""
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
    """Autograd does not look for this where hooks are set."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward pass needs was changed in place "
            "after the forward pass had saved it; replace the in-place operation"
        )
