"""Parameters between two steps, when the user may change them by hand.

    during a step     nn.Parameter       as the user made it
    between steps     IdleParameter      the same object; `.data` shares its version counter, so that a write
                                         through it is seen, and `.grad` raises where no rank has it whole

torch's own `.data` has a version counter of its own: whoever clamps `weight.data` leaves no trace.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from echelon.errors import UserError

_DATA: Any = Tensor.data  # descriptors of torch's class
_GRAD: Any = Tensor.grad


@final
class Idle:
    """The parameters of one engine, and whether it is between two steps."""

    def __init__(self, lost_gradient: str | None = None) -> None:
        """`lost_gradient`: what to tell those who use a gradient, where ranks keep parts of them."""
        self.lost_gradient, self.is_idle = lost_gradient, False
        self._parameters: list[nn.Parameter] = []

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        if not _is_traced_apart(parameter):
            _watched[parameter] = _Watched(self, name)
            self._parameters.append(parameter)

    def begin(self) -> None:
        """A step has ended."""
        self.is_idle = True
        for parameter in self._parameters:
            if parameter.__class__ is nn.Parameter:
                parameter.__class__ = IdleParameter

    def end(self) -> None:
        """A step begins, or the engine closes."""
        self.is_idle = False
        for parameter in self._parameters:
            if type(parameter) is IdleParameter:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]


class _Watched(NamedTuple):
    idle: Idle
    name: str


_watched: MutableMapping[Tensor, _Watched] = WeakIdKeyDictionary()


class IdleParameter(nn.Parameter):
    """A parameter that an engine trains, between two of its steps."""

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)

    @property
    def grad(self) -> Tensor | None:
        return gradient_between_steps(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copied
        return copied


def idle_kind(parameter: nn.Parameter, kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """What a parameter of this kind is now."""
    watched = _watched.get(parameter)
    return IdleParameter if kind is nn.Parameter and watched is not None and watched.idle.is_idle else kind


def is_idle(parameter: Tensor) -> bool:
    """Whether its engine, if it has one, is between two steps."""
    watched = _watched.get(parameter)
    return watched is not None and watched.idle.is_idle


def gradient_between_steps(parameter: Tensor) -> Tensor | None:
    """Its gradient; where ranks keep parts of it, something that may be dropped and not used."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _GRAD.__get__(parameter)
        watched = _watched.get(parameter)
        if watched is None or not watched.idle.is_idle or watched.idle.lost_gradient is None:
            return gradient
        if not parameter.requires_grad:
            return gradient
        lost = parameter.detach().new_zeros(()).expand(parameter.shape).as_subclass(LostGradient)
        lost.text = f"the gradient of {watched.name}: {watched.idle.lost_gradient}"
        return lost


@final
class LostGradient(Tensor):
    """In place of a gradient that no rank has: whoever computes with it is told so."""

    text: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__set__", "size", "dim", "numel", "stride"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        lost = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if type(leaf) is cls)
        raise UserError(lost.text)


def _is_traced_apart(parameter: nn.Parameter) -> bool:
    """Whether its type is somebody else's, with attributes of its own."""
    return type(parameter) is not nn.Parameter and not type(parameter).__module__.startswith("echelon.")
