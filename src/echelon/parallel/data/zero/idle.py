"""Parameters between two steps, when the user may change them by hand.

    during a step     nn.Parameter       as the user made it
    between steps     IdleParameter      the same object; `.data` shares its version counter, so that a write
                                         through it is seen, and `.grad` raises where no rank has it whole

torch's own `.data` has a version counter of its own: whoever clamps `weight.data` leaves no trace.
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple, final
from weakref import ref

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
            _watched[parameter] = _Watched(ref(self), name)
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
        end_idle(self._parameters)


class _Watched(NamedTuple):
    engine: "ref[Idle]"  # which has the parameter, and may be gone
    name: str

    @property
    def idle(self) -> Idle | None:
        """Its engine's, if that is between two steps."""
        idle = self.engine()
        return idle if idle is not None and idle.is_idle else None


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
    return IdleParameter if kind is nn.Parameter and is_idle(parameter) else kind


def is_idle(parameter: Tensor) -> bool:
    """Whether its engine, if it has one, is between two steps."""
    watched = _watched.get(parameter)
    return watched is not None and watched.idle is not None


def end_idle(parameters: Iterable[nn.Parameter]) -> None:
    """Another engine takes them, as the user made them."""
    for parameter in parameters:
        if type(parameter) is IdleParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def gradient_between_steps(parameter: Tensor) -> Tensor | None:
    """Its gradient; where ranks keep parts of it, something that may be dropped and not used."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _GRAD.__get__(parameter)
        watched = _watched.get(parameter)
        idle = None if watched is None else watched.idle
        if watched is None or idle is None or idle.lost_gradient is None or not parameter.requires_grad:
            return gradient
        lost = parameter.detach().new_zeros(()).expand(parameter.shape).as_subclass(LostGradient)
        lost.text = f"the gradient of {watched.name}: {idle.lost_gradient}"
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
