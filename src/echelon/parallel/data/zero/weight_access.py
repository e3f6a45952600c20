"""Access to parameters while an engine trains them: each state is a class that the same object takes on.

    during a step     nn.Parameter       as the user made it
    between steps     IdleParameter      `.data` shares its version counter, so that a write through it is
                                         seen, and `.grad` raises where no rank has it whole
                      PartParameter      a part of a weight or of a model: only modules read its values
    freed             FreedParameter     has no values here: any function of torch that reads it asks its
                                         owner first, which gathers the weight, waits for it, or raises

torch's own `.data` has a version counter of its own: a clamp of `weight.data` leaves no trace. Of a freed
weight, shape, type, device and gradient can be read at any time. Autograd's own reads do not come by here.
"""

import copy
import sys
import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple, cast, final
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from echelon.errors import UserError
from echelon.nn.tracing import FUNCTIONS_WITHOUT_VALUES, untraced
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.parameter_set import ParameterSet
from echelon.state.ownership import LocalParameter

_DATA: Any = Tensor.data  # descriptors of torch's class
_GRAD: Any = Tensor.grad


@final
class Idle:
    """The parameters of one engine, and whether it is between two steps."""

    def __init__(self, lost_gradient: str | None = None) -> None:
        """`lost_gradient`: what to tell those who use a gradient, where ranks keep parts of them."""
        self.lost_gradient, self.is_idle = lost_gradient, False
        self.keeps_gradients = False  # which wait for an update
        self.thread = threading.get_ident()  # the user's: others, of engines, see parameters as they are
        self._parameters: list[tuple[nn.Parameter, type[nn.Parameter]]] = []  # the class when idle

    def watch(self, name: str, parameter: nn.Parameter, part: str | None = None) -> None:
        """`part`: what to tell those who read its values, where these are a part of something."""
        # A type of another library has attributes of its own.
        if type(parameter) is nn.Parameter or type(parameter).__module__.startswith("echelon."):
            kind = IdleParameter if part is None else PartParameter
            _watched[parameter] = _Watched(ref(self), name, kind, part)
            self._parameters.append((parameter, kind))

    def begin(self) -> None:
        """A step has ended."""
        self.is_idle = True
        for parameter, kind in self._parameters:
            if parameter.__class__ is nn.Parameter:
                parameter.__class__ = kind

    def end(self) -> None:
        """A step begins, or the engine closes."""
        self.is_idle = False
        end_idle(parameter for parameter, _ in self._parameters)


class _Watched(NamedTuple):
    engine: "ref[Idle]"  # which has the parameter, and may be gone
    name: str
    kind: type[nn.Parameter]
    part: str | None

    @property
    def idle(self) -> Idle | None:
        """Its engine's, if that is between two steps."""
        idle = self.engine()
        return idle if idle is not None and idle.is_idle else None

    @property
    def guard(self) -> Idle | None:
        """The same, where the user reads it: not a thread of the engine, and not a tracer."""
        idle = self.idle
        is_user = idle is not None and idle.thread == threading.get_ident()
        return idle if is_user and TracingContext.try_get() is None else None


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
        _replace_gradient(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copied
        return copied


def idle_kind(parameter: nn.Parameter, kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return _watched[parameter].kind if kind is nn.Parameter and is_idle(parameter) else kind


def is_idle(parameter: Tensor) -> bool:
    """Return whether its engine, if it has one, is between two steps."""
    watched = _watched.get(parameter)
    return watched is not None and watched.idle is not None


def end_idle(parameters: Iterable[nn.Parameter]) -> None:
    """Another engine takes them, as the user made them."""
    for parameter in parameters:
        if type(parameter) in (IdleParameter, PartParameter):
            parameter.__class__ = nn.Parameter


def gradient_between_steps(parameter: Tensor) -> Tensor | None:
    """Its gradient; where ranks keep parts of it, something that may be dropped and not used."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _GRAD.__get__(parameter)
        watched = _watched.get(parameter)
        idle = None if watched is None else watched.guard
        if watched is None or idle is None or idle.lost_gradient is None or not parameter.requires_grad:
            return gradient
        zeros = parameter.detach().new_zeros(()).expand(parameter.shape)
        return _lost(zeros, f"the gradient of {watched.name}: {idle.lost_gradient}", not idle.keeps_gradients)


def _replace_gradient(parameter: Tensor, value: Tensor | None) -> None:
    """Set its gradient, unless that of before waits for an update: ranks would not see it."""
    watched = _watched.get(parameter)
    idle = None if watched is None else watched.guard
    with torch._C.DisableTorchFunctionSubclass():
        if watched is not None and idle is not None and idle.keeps_gradients and parameter.requires_grad:
            raise UserError(f"the gradient of {watched.name}: {idle.lost_gradient}")
        _GRAD.__set__(parameter, value)


@final
class LostGradient(Tensor):
    """In place of a gradient that no rank has: to compute with it raises. If it does not wait, drop it."""

    text: str
    may_be_dropped: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        lost = next(leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls)
        if name in _DROPS and lost.may_be_dropped:
            return lost
        if name not in _QUESTIONS | _CONVERSIONS:
            raise UserError(lost.text)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return _lost(result, lost.text, lost.may_be_dropped) if name in _CONVERSIONS else result


def _lost(tensor: Tensor, text: str, may_be_dropped: bool) -> LostGradient:
    lost = tensor.as_subclass(LostGradient)
    lost.text, lost.may_be_dropped = text, may_be_dropped
    return lost


_DROPS = {"zero_", "_foreach_zero_", "detach_", "requires_grad_"}
_QUESTIONS = {"__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex"}
_QUESTIONS.add("_has_compatible_shallow_copy_type")
_CONVERSIONS = {"to", "cpu", "cuda", "half", "bfloat16", "float", "double"}


class PartParameter(IdleParameter):
    """A parameter between two steps that is a part of a weight, or whose rank has a part of the weights."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in FUNCTIONS_WITHOUT_VALUES or getattr(func, "__name__", "") in ("numel", "nelement"):
            for leaf in tree_leaves((args, kwargs)):
                if type(leaf) is cls:
                    _check_part(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _check_part(self)
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _check_part(self)
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


# Modules that are called or converted, and functions of their backward passes.
_MODULE_CODE = {each.__code__ for each in (nn.Module._call_impl, nn.Module._apply, BackwardCFunction.apply)}


def _check_part(parameter: PartParameter) -> None:
    """Refuse a read of values outside of modules and the engine, which know how to compute with parts."""
    watched, frame = _watched[parameter], cast(Any, sys._getframe(1))
    while frame.f_globals is globals():
        frame = frame.f_back
    is_engine = frame.f_globals.get("__name__", "").startswith("echelon.")
    while frame is not None and frame.f_code not in _MODULE_CODE:
        frame = frame.f_back
    if frame is None and not is_engine and watched.guard is not None:
        raise UserError(f"{watched.name}: {watched.part}")


class FreedParameter(nn.Parameter):
    """A parameter whose values are not on this rank at the moment."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == _GET_GRADIENT:
            return gradient_between_steps(args[0])
        if func == _SET_GRADIENT:
            return _replace_gradient(*args)
        if func in FUNCTIONS_WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _read(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _make_whole(self)
        return copy.deepcopy(self, memo)


class _Freed(NamedTuple):
    """The owner that can make a parameter whole, and its class then."""

    name: str
    read: "WeakMethod[Callable[[str], None]]"
    kind: type[nn.Parameter]


# What is known of each parameter that comes and goes.
_freed: MutableMapping[Tensor, _Freed] = WeakIdKeyDictionary()


def register_owner(parameter: nn.Parameter, name: str, read: Callable[[str], None]) -> None:
    """Call `read(name)`, a method, when the parameter is read while it is freed."""
    _freed[parameter] = _Freed(name, WeakMethod(read), type(parameter))


def mark_whole(parameter: nn.Parameter) -> None:
    """It may be read again, as what it was."""
    if parameter in _freed:
        parameter.__class__ = idle_kind(parameter, _freed[parameter].kind)


@untraced
def _read(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `func` when all parameters among its arguments are whole."""
    if func is Tensor.__repr__:
        return f"{_freed[args[0]].name}, freed, shape={tuple(args[0].shape)}"
    for leaf in tree_leaves((args, kwargs)):
        if type(leaf) is FreedParameter:
            _make_whole(leaf)
    if func == _GET_DATA and is_idle(args[0]):
        return args[0].detach()  # a write through it is then seen
    return func(*args, **kwargs)


def _make_whole(parameter: FreedParameter) -> None:
    name, read, _ = _freed[parameter]
    owner = read()
    if owner is None:
        raise UserError(
            f"{name} has no values on this rank: its engine is gone, and has left a part, or nothing, of it "
            "here (zero=3, offload); end an engine with engine.close(), which puts the model together"
        )
    owner(name)
    assert type(parameter) is not FreedParameter, f"{name} is not whole"


_GET_DATA, _GET_GRADIENT, _SET_GRADIENT = _DATA.__get__, _GRAD.__get__, _GRAD.__set__


# New weights of a rank that holds whole parameters, on their way from the host: waited for when first used.
#
# A module waits for the weights of its unit when it is called. Any other read (the user between two steps, a
# module that reads the weight of another one) waits for that weight: until it is there, it is a
# `FreedParameter`.


Wait = Callable[[Sequence[LocalParameter]], None]


@final
class NewWeights:
    """Watches the parameters of one set."""

    def __init__(
        self, parameter_set: ParameterSet, local: Sequence[LocalParameter], wait: Wait, wrapping: Wrapping
    ) -> None:
        """`wait`: returns when the new weights of local parameters are there."""
        self._wait = wait
        self._local = {each.parameter: each for each in local}
        self._names = {each.name: each for each in local}
        for each in local:
            register_owner(each.parameter, each.name, self._read)
        for unit in parameter_set.units:
            parameters = [p for need in unit.needs for _, p in parameter_set.units[need].parameters]
            needed = [self._local[p] for p in parameters if p in self._local]
            if needed:
                wrapping.before("offload", unit.module, self._before(needed), with_kwargs=True, prepend=True)

    def hide(self) -> None:
        """Refuse reads of all of them from now on."""
        self.expect(list(self._local.values()))

    def expect(self, local: Sequence[LocalParameter]) -> None:
        """New weights of these will come: reads of the old ones wait."""
        for each in local:
            if each.parameter in self._local and each.parameter.numel():
                each.parameter.__class__ = FreedParameter

    def arrive(self, local: Sequence[LocalParameter]) -> None:
        for each in local:
            if each.parameter in self._local:
                mark_whole(each.parameter)

    def _before(self, needed: Sequence[LocalParameter]) -> Callable[..., None]:
        @untraced
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG001
            self._wait(needed)

        return hook

    def _read(self, name: str) -> None:
        self._wait([self._names[name]])


@final
class ResidentWeights:
    """Weights that are whole on every rank, and that ranks wait for together when they share them."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], check: Callable[[], None]) -> None:
        """`check`: raises when they may not be read any more."""
        self._check = check
        self._parameters = [parameter for _, parameter in parameters if parameter.numel()]
        for name, parameter in parameters:
            register_owner(parameter, name, self._read)

    def hide(self) -> None:
        """Refuse reads of all of them from now on."""
        for parameter in self._parameters:
            parameter.__class__ = FreedParameter

    def _read(self, name: str) -> None:  # noqa: ARG002
        self._check()
